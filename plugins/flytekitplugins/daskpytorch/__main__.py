"""Command that checks whether gangs can train here and on a cluster: `python -m flytekitplugins.daskpytorch`.

`python -m flytekitplugins.daskpytorch profile` requests a flame graph of a running rank. `daskpytorch run` runs a
script in ranks, and `daskpytorch attach` opens a rank's debugger. `daskpytorch` stands for `python -m
flytekitplugins.daskpytorch`.
"""

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from importlib import import_module

import click

from flytekitplugins.daskpytorch import doctor
from flytekitplugins.daskpytorch.checks import MAX_SECONDS, is_seconds
from flytekitplugins.daskpytorch.command_line import scheduler_option
from flytekitplugins.daskpytorch.doctor import Finding
from flytekitplugins.daskpytorch.process.signals import EXIT_CODE

SUBCOMMANDS = {"attach": "attach_command", "profile": "flame_graphs", "run": "run_command"}
"""Module of each subcommand, by the name of the subcommand, which is also the name of its function."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand that the first word names, else the checks, and return the exit code.

    Exit code 2: a word of the command line cannot be used. 130: Ctrl-C.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    command, name = examine, "daskpytorch"
    if words and words[0] in SUBCOMMANDS:
        command = getattr(import_module(f"flytekitplugins.daskpytorch.{SUBCOMMANDS[words[0]]}"), words[0])
        name = f"daskpytorch {words.pop(0)}"
    command.context_settings = {"help_option_names": ["-h", "--help"], **command.context_settings}
    try:
        return int(command.main(words, prog_name=name, standalone_mode=False) or 0)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort as abort:
        if isinstance(abort.__cause__, EOFError):  # click takes each EOFError of a command for a Ctrl-D at its prompt
            raise abort.__cause__ from None
        return EXIT_CODE


def _timeout(text: str) -> float:
    with contextlib.suppress(ValueError):
        if is_seconds(seconds := float(text)):
            return seconds
    raise click.BadParameter(f"{text!r}: must be seconds above 0 and at most {MAX_SECONDS}")


@click.command()
@scheduler_option("also check the cluster of this Dask scheduler")
@click.option("--gang/--no-gang", default=True, help="run or skip the test gang of two ranks, which takes seconds")
@click.option(
    "--timeout",
    type=_timeout,
    default=60.0,
    metavar="SECONDS",
    show_default=True,
    help="timeout for the test gang, and, up to 10 s, for the scheduler's answer",
)
@click.option("--json", "is_json", is_flag=True, help="print the findings as JSON: what, value, verdict and advice")
def examine(*, scheduler: str | None, gang: bool, timeout: float, is_json: bool) -> int:
    """Check whether gangs can train on this machine and on a Dask cluster.

    The checks cover versions, GPUs, addresses, and a test gang of two ranks. Exit code 1 if there is a problem.
    The subcommands `run`, `attach` and `profile` have a `--help` of their own.
    """
    findings = doctor.examine(scheduler, with_gangs=gang, timeout=timeout)
    if is_json:
        found = list(findings)
        print(json.dumps([asdict(finding) for finding in found], indent=2))
    else:
        found = list(_shown(findings))
    return int(any(finding.verdict == "problem" for finding in found))


def _shown(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Print each finding as it comes, the advice below it, and yield the finding."""
    for finding in findings:
        print(f"{finding.verdict:8} {finding.what:28} {finding.value}")
        if finding.advice:
            print(f"{'':37} {finding.advice}", flush=True)
        yield finding


if __name__ == "__main__":
    sys.exit(main())
