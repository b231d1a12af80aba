"""Command that runs a script or module in a gang's ranks, as `torchrun` does: `daskpytorch run train.py --lr 0.1`.

Runs in the driver. The ranks are processes of this node, or of the workers of a Dask cluster.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal

import click

from flytekitplugins.daskpytorch.display.terminal import Board
from flytekitplugins.daskpytorch.errors import GangError, GangStartError, PreemptedError
from flytekitplugins.daskpytorch.node import fork_client
from flytekitplugins.daskpytorch.process.ending import EXIT_CODE
from flytekitplugins.daskpytorch.process.streams import Screen, say
from flytekitplugins.daskpytorch.protocol.script import Script, module_of, script_of
from flytekitplugins.daskpytorch.settings import SCHEDULER_VARIABLE, Gang
from flytekitplugins.daskpytorch.task import process

if TYPE_CHECKING:
    from distributed import Client

RENDEZVOUS = ("rdzv-backend", "rdzv-endpoint", "rdzv-id", "master-addr", "master-port")
WITHOUT_MEANING = ("log-dir", "nnodes", "node-rank", *RENDEZVOUS)
COUNT = click.IntRange(min=1)
SOURCE = f"--scheduler or {SCHEDULER_VARIABLE}: without them, this machine is meant"


def _ranks(text: str) -> int | Literal["auto"]:
    """The words are those of `torchrun`."""
    if text in ("auto", "gpu"):
        return "auto"
    return os.cpu_count() or 1 if text == "cpu" else int(click.INT(text))


def _hang_timeout(text: str) -> float | Literal["auto"] | None:
    try:
        return "auto" if text == "auto" else None if text == "none" else float(text)
    except ValueError:
        raise click.BadParameter(f"{text!r}: must be auto, none or seconds") from None


def _variable(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise click.BadParameter(f"{text!r}: must be NAME=VALUE")
    return name, value


def _note_without_meaning(_: click.Context, option: click.Parameter, value: object) -> None:
    if value:
        say(f"torchrun's option {option.opts[0]} has no effect here. `daskpytorch run --help` lists those with one")


def _accepting_torchruns(command: click.Command) -> click.Command:
    about: dict[str, Any] = {"hidden": True, "expose_value": False, "callback": _note_without_meaning}
    options = [click.Option([f"--{name}"], **about) for name in WITHOUT_MEANING]
    command.params += [*options, click.Option(["--standalone"], is_flag=True, **about)]
    return command


def _setting(name: str, words: str, metavar: str | None = None, *, type: Any = None) -> Callable[[Any], Any]:  # noqa: A002
    [default] = [field.default for field in fields(Gang) if field.name == name]
    return click.option(f"--{name.replace('_', '-')}", type=type, default=default, metavar=metavar, help=words)


@_accepting_torchruns
@click.command(
    context_settings={
        "allow_interspersed_args": False,  # the words after the program are the program's own
        "show_default": True,
        "token_normalize_func": lambda name: name.replace("_", "-"),  # torchrun takes both, too
    },
    options_metavar="[OPTIONS] [-m]",
    short_help="Run a script or module in several ranks, as torchrun does.",
)
@click.option(
    "--nproc",
    "--nproc-per-node",
    "ranks_per_worker",
    type=_ranks,
    default="auto",
    metavar="N",
    help="ranks on this node, or on each Dask worker. auto: one per GPU, else one",
)
@click.option(
    "--scheduler",
    metavar="ADDRESS",
    envvar=SCHEDULER_VARIABLE,
    show_envvar=True,
    help="Dask scheduler on whose workers the ranks run (default: this node)",
)
@click.option(
    "--workers",
    type=COUNT,
    metavar="N",
    help="number of the Dask workers to take (default: all). Without --scheduler: workers of a Dask cluster that the "
    "command starts on this node",
)
@click.option(
    "--virtual-local-rank", is_flag=True, help="each rank sees only its own GPU, as device 0, and LOCAL_RANK is 0"
)
@_setting("max_restarts", "restarts of a failed gang", "N")
@_setting(
    "hang_timeout", "time without signs of life after which the gang ends", "auto|none|SECONDS", type=_hang_timeout
)
@_setting(
    "on_error",
    "hold: a rank that raises an exception waits in pdb until a terminal has come and left",
    type=click.Choice(["stop", "hold"]),
)
@_setting("attach_timeout", "timeout for `daskpytorch attach` to open the debugger of a rank that waits", "SECONDS")
@click.option(
    "--checkpoints",
    "checkpoint_uri",
    metavar="FOLDER|URL",
    help="storage for checkpoints, from which the same command goes on (default: a folder of the user's cache, from "
    "which the command goes on with DASKPYTORCH_RESUME=1)",
)
@click.option(
    "--env",
    "environment",
    multiple=True,
    type=_variable,
    metavar="NAME=VALUE",
    help="set an environment variable in all ranks, as if before Python started. May be repeated",
)
@click.option("-m", "--module", is_flag=True, help="PROGRAM is a module, as with python -m")
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    *,
    program: str,
    arguments: Sequence[str],
    module: bool,
    scheduler: str | None,
    workers: int | None,
    virtual_local_rank: bool,
    environment: Sequence[tuple[str, str]],
    **settings: Any,
) -> int:
    """Run a training script or module in several ranks, as torchrun does, on this node or on a Dask cluster's workers.

    If a rank fails, all ranks start again from the newest checkpoint that the program saved by
    current_rank().checkpoint. The exit code is that of the rank that failed. Exit code 2: an option or the program
    cannot be used. 130: Ctrl-C. 143: SIGTERM.
    """
    if arguments[:1] == ("--",):  # torchrun drops a first --, too
        arguments = arguments[1:]
    try:
        script = (module_of if module else script_of)(program, *arguments)
        gang = Gang(
            workers=workers if scheduler else None,
            devices="own" if virtual_local_rank else "all",
            environment=dict(environment),
            **settings,
        )
    except (OSError, SyntaxError, ImportError, ValueError) as error:
        raise click.UsageError(f"{type(error).__name__}: {error}") from error
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        Board.output = Screen(is_output=True)
    try:
        with process.heeding_sigterm(), _client_of(scheduler, workers, gang) as client:
            return _run(client, script, gang)
    except KeyboardInterrupt:
        return EXIT_CODE
    except PreemptedError:
        click.echo("daskpytorch run: the command was told to end (SIGTERM) before the ranks started", err=True)
        return 128 + signal.SIGTERM
    except (GangError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    finally:
        Board.output = None


def _run(client: Client | None, script: Script, gang: Gang) -> int:
    from flytekitplugins.daskpytorch import dispatch

    if (error := dispatch.run(client, script, gang=gang).exception()) is None:
        return 0
    print(error.__cause__ if isinstance(error.__cause__, GangError) else error, file=sys.stderr)
    return _code_for(error)


def _code_for(error: BaseException) -> int:
    gang_error = error if isinstance(error, GangError) else error.__cause__
    if isinstance(gang_error, PreemptedError):
        return 128 + signal.SIGTERM
    code = gang_error.exit_code if isinstance(gang_error, GangError) else None
    return 1 if not code else code if code > 0 else 128 - code


@contextlib.contextmanager
def _client_of(scheduler: str | None, workers: int | None, gang: Gang) -> Iterator[Client | None]:
    """None: the ranks run on this node."""
    if scheduler is None:
        fork_client.connect().close()  # the server imports torch while this process imports its own modules
        if workers is None:
            yield None
            return
    from flytekitplugins.daskpytorch.dask import cluster

    if scheduler is not None:
        os.environ[SCHEDULER_VARIABLE] = scheduler
        try:
            cluster.greet(scheduler, min(cluster.CONNECT_TIMEOUT, gang.start_timeout))
        except OSError as error:
            raise GangStartError(f"no Dask scheduler answers at {scheduler} ({SOURCE}): {error}") from error
    with cluster.opened(num_workers=workers or 1, start_timeout=gang.start_timeout, source=SOURCE) as client:
        yield client
