"""Command that runs a script or module in a gang's ranks, as `torchrun` does: `daskpytorch run train.py --lr 0.1`.

Runs in the driver. The ranks are processes of this node, or of the workers of a Dask cluster.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flytekitplugins.daskpytorch.errors import GangError, PreemptedError
from flytekitplugins.daskpytorch.node import fork_client
from flytekitplugins.daskpytorch.process.log import say
from flytekitplugins.daskpytorch.process.signals import EXIT_CODE
from flytekitplugins.daskpytorch.protocol.script import Script, module_of, script_of
from flytekitplugins.daskpytorch.settings import SCHEDULER_VARIABLE, Gang
from flytekitplugins.daskpytorch.task import process

if TYPE_CHECKING:
    from distributed import Client

BAD_INPUT = 2
"""Exit code for a program or an option that cannot be used, as Python's own for a missing script."""
GREETING_TIMEOUT = 10.0
"""Timeout, in seconds, for the first answer of the Dask scheduler."""
WITHOUT_MEANING = (
    *("--nnodes", "--node-rank", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--master-addr"),
    *("--master-port", "--local-addr", "--monitor-interval", "--start-method", "--role", "--redirects", "-r", "--tee"),
    *("-t", "--local-ranks-filter", "--event-log-handler", "--logs-specs", "--numa-binding", "--signals-to-handle"),
    *("--shutdown-timeout", "--log-line-prefix-template", "--duplicate-stdout-filters", "--duplicate-stderr-filters"),
)
"""Options of `torchrun` that take a value, and have no effect here."""
FLAGS_WITHOUT_MEANING = ("--standalone", "--run-path")
"""Options of `torchrun` that take no value, and have no effect here."""


def main(words: Sequence[str]) -> int:
    """Run the program that the words of the command line name, and return the exit code of the rank that failed, or 0.

    Exit code 2: an option or the program cannot be used. 130: Ctrl-C. 143: SIGTERM.
    """
    parser = _parser()
    options = parser.parse_args(words)
    try:
        script = (module_of if options.module else script_of)(options.program, *options.arguments)
        gang = _gang_of(options)
        if options.deck is not None:
            Path(options.deck).touch()  # an unwritable file is an error before the training
    except (OSError, SyntaxError, ImportError, ValueError) as error:
        print(f"daskpytorch run: {type(error).__name__}: {error}", file=sys.stderr)
        return BAD_INPUT
    if script.args in (("--help",), ("-h",)):  # of the program, without a gang
        os.execv(sys.executable, [sys.executable, *(["-m"] if script.is_module else []), script.given, *script.args])  # noqa: S606
    for option in options.without_meaning:
        say(f"{option} of torchrun has no effect here. `daskpytorch run --help` lists the options that have one")
    try:
        with process.heeding_sigterm(), _client_of(options) as client:
            return _run(client, script, gang, options.deck)
    except KeyboardInterrupt:
        return EXIT_CODE
    except PreemptedError:
        print("daskpytorch run: the command was told to end (SIGTERM) before the ranks started", file=sys.stderr)
        return 128 + signal.SIGTERM
    except (GangError, OSError, ValueError) as error:
        print(f"daskpytorch run: {error}", file=sys.stderr)
        return 1


def _run(client: Client | None, script: Script, gang: Gang, deck: str | None) -> int:
    from flytekitplugins.daskpytorch import dispatch

    futures = dispatch.run(client, script, gang=gang)
    try:
        error = futures.exception()
    finally:
        if deck is not None:
            say(f"the page of the training: {futures.report(deck)}")
    if error is None:
        return 0
    print(error.__cause__ if isinstance(error.__cause__, GangError) else error, file=sys.stderr)
    return _code_for(error)


def _code_for(error: BaseException) -> int:
    """Return the exit code of a command whose gang ended with this error: the failed rank's, or 128 and its signal."""
    gang_error = error if isinstance(error, GangError) else error.__cause__
    if isinstance(gang_error, PreemptedError):
        return 128 + signal.SIGTERM
    code = gang_error.exit_code if isinstance(gang_error, GangError) else None
    return 1 if not code else code if code > 0 else 128 - code


def _gang_of(options: argparse.Namespace) -> Gang:
    return Gang(
        backend=options.backend,
        ranks_per_worker=options.nproc,
        devices="own" if options.virtual_local_rank else "all",
        workers=options.workers if options.scheduler else None,
        min_workers=options.min_workers,
        max_restarts=options.max_restarts,
        start_timeout=options.start_timeout,
        hang_timeout=options.hang_timeout,
        on_error=options.on_error,
        attach_timeout=options.attach_timeout,
        environment=dict(options.env or ()),
        log_dir=options.log_dir,
        checkpoint_uri=options.checkpoints,
    )


@contextlib.contextmanager
def _client_of(options: argparse.Namespace) -> Iterator[Client | None]:
    """Yield the client of the Dask cluster on whose workers the ranks run. None: the ranks run on this node."""
    if options.scheduler is None:
        fork_client.connect().close()  # the server imports torch while this process imports its own modules
        if options.workers is None:
            yield None
            return
    from flytekitplugins.daskpytorch.dask import cluster

    if options.scheduler is not None:
        os.environ[SCHEDULER_VARIABLE] = options.scheduler
        cluster.greet(options.scheduler, min(GREETING_TIMEOUT, options.start_timeout))
    least = options.min_workers or options.workers or 1
    with cluster.opened(
        num_workers=options.workers or least, min_workers=least, start_timeout=options.start_timeout
    ) as client:
        yield client


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="daskpytorch run",
        usage="daskpytorch run [options] [-m] PROGRAM [ARGUMENTS ...]",
        description="Runs a training script or module in several ranks, as torchrun does, on this node or on the "
        "workers of a Dask cluster. If a rank fails, all ranks start again from the newest checkpoint that the program "
        "saved by current_rank().checkpoint. The exit code is that of the rank that failed.",
        allow_abbrev=False,
    )
    add = _Adding(parser)
    place = parser.add_argument_group("where the ranks run")
    add(
        place,
        "--nproc",
        "--nproc-per-node",
        type=_count_or_auto,
        default="auto",
        metavar="N",
        help="ranks on this node, or on each Dask worker (default: one per GPU, else one)",
    )
    add(
        place,
        "--scheduler",
        default=os.environ.get(SCHEDULER_VARIABLE) or None,
        metavar="ADDRESS",
        help=f"Dask scheduler on whose workers the ranks run (default: ${SCHEDULER_VARIABLE}, else this node)",
    )
    add(
        place,
        "--workers",
        type=_count,
        metavar="N",
        help="number of the Dask workers to take (default: all). Without --scheduler: workers of a Dask cluster that "
        "the command starts on this node",
    )
    add(
        place,
        "--min-workers",
        type=_count,
        metavar="N",
        help="number of workers with which the gang starts, or restarts after losing workers (default: all)",
    )
    add(
        place,
        "--backend",
        choices=("auto", "gloo", "nccl"),
        default="auto",
        help="backend of the process group (default: nccl if each rank has a GPU, else gloo)",
    )
    add(
        place,
        "--virtual-local-rank",
        action="store_true",
        help="each rank sees only its own GPU, as device 0, and LOCAL_RANK is 0",
    )
    faults = parser.add_argument_group("failures")
    add(faults, "--max-restarts", type=int, default=3, metavar="N", help="restarts of a failed gang (default: 3)")
    add(
        faults,
        "--start-timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="timeout for workers and ranks to start (default: 600)",
    )
    add(
        faults,
        "--hang-timeout",
        type=_hang_timeout,
        default="auto",
        metavar="auto|none|SECONDS",
        help="time without signs of life after which the gang ends (default: auto)",
    )
    add(
        faults,
        "--on-error",
        choices=("stop", "hold"),
        default="stop",
        help="hold: a rank that raises an exception waits in pdb until a terminal has come and left (default: stop)",
    )
    add(
        faults,
        "--attach-timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="timeout for `daskpytorch attach` to open the debugger of a rank that waits (default: 300)",
    )
    files = parser.add_argument_group("files and variables")
    add(
        files,
        "--checkpoints",
        metavar="FOLDER|URL",
        help="storage for checkpoints, from which the same command goes on (default: a folder of the user's cache, "
        "from which the command goes on with DASKPYTORCH_RESUME=1)",
    )
    add(
        files,
        "--log-dir",
        metavar="FOLDER",
        help="write each rank's output to files here, too, on the rank's own machine",
    )
    add(files, "--deck", metavar="FILE", help="write the page of the training to this HTML file at the end")
    add(
        files,
        "--env",
        action="append",
        type=_variable,
        metavar="NAME=VALUE",
        help="set an environment variable in all ranks, as if before Python started. May be repeated",
    )
    parser.add_argument("-m", "--module", action="store_true", help="PROGRAM is a module, as with python -m")
    for option in WITHOUT_MEANING:
        add(parser, option, action=_WithoutMeaning, help=argparse.SUPPRESS)
    for option in FLAGS_WITHOUT_MEANING:
        add(parser, option, action=_WithoutMeaning, nargs=0, help=argparse.SUPPRESS)
    parser.add_argument("program", metavar="PROGRAM", help="path of a script, or with -m the name of a module")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="command-line arguments of the program"
    )
    parser.set_defaults(without_meaning=[])
    return parser


class _Adding:
    """Adds options to a parser under their names, and hidden under the names with `_`, as `torchrun` does."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._parser = parser

    def __call__(self, group: Any, *names: str, **how: Any) -> None:
        group.add_argument(*names, **how)
        other = [f"--{name[2:].replace('-', '_')}" for name in names if "-" in name[2:]]
        if other:
            dest = names[0].lstrip("-").replace("-", "_")
            self._parser.add_argument(*other, **how | {"help": argparse.SUPPRESS, "dest": dest})


class _WithoutMeaning(argparse.Action):
    def __call__(self, parser: object, options: argparse.Namespace, values: object, option: str | None = None) -> None:
        options.without_meaning = [*options.without_meaning, option]


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number from 1 up")
    return int(text)


def _count_or_auto(text: str) -> int | Literal["auto"]:
    return "auto" if text in ("auto", "gpu") else (os.cpu_count() or 1) if text == "cpu" else _count(text)


def _hang_timeout(text: str) -> float | Literal["auto"] | None:
    try:
        return "auto" if text == "auto" else None if text == "none" else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be auto, none or seconds") from None


def _variable(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise argparse.ArgumentTypeError(f"{text!r}: must be NAME=VALUE")
    return name, value
