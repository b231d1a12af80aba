"""Says whether gangs can train here and on a cluster, and what to do: `python -m flytekitplugins.daskpytorch`."""

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flytekitplugins.daskpytorch import doctor
from flytekitplugins.daskpytorch.doctor import Finding
from flytekitplugins.daskpytorch.settings import SCHEDULER_VARIABLE

STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}
PIPE_WIDTH = 120


def main(arguments: Sequence[str] | None = None) -> int:
    """Examine, print what is found, and return the exit code: 0 where there is no problem, else 1."""
    options = _parser().parse_args(arguments)
    findings = doctor.examine(options.scheduler, with_gangs=options.gang, timeout=options.timeout)
    if options.json:
        found = list(findings)
        print(json.dumps([asdict(finding) for finding in found], indent=2))
    else:
        found = list(_shown(findings))
    return int(any(finding.verdict == "problem" for finding in found))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flytekitplugins.daskpytorch",
        description="Looks for what would keep ranks from training, on this machine and on a Dask cluster: versions, "
        "GPUs, commands, addresses; and has two ranks meet. Exit code 1 if there is a problem.",
    )
    parser.add_argument(
        "--scheduler",
        metavar="ADDRESS",
        default=os.environ.get(SCHEDULER_VARIABLE) or None,
        help=f"also look at the cluster of this Dask scheduler (default: ${SCHEDULER_VARIABLE}, else none)",
    )
    parser.add_argument(
        "--no-gang", dest="gang", action="store_false", help="do not have two ranks meet, which takes seconds"
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=60.0,
        metavar="SECONDS",
        help="for two ranks to meet, and, at most 10, for a scheduler to answer (default: 60)",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list of what, value, verdict and advice")
    return parser


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be seconds above 0")
    return seconds


def _shown(findings: Iterable[Finding]) -> Iterator[Finding]:
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)
    for finding in findings:
        line = Table.grid(padding=(0, 1))
        line.add_column(width=8)
        line.add_column(width=28, overflow="fold")
        line.add_column(overflow="fold")
        line.add_row(Text(finding.verdict, STYLES[finding.verdict]), Text(finding.what), Text(finding.value))
        if finding.advice:
            line.add_row("", "", Text(finding.advice, STYLES[finding.verdict]))
        console.print(line)
        yield finding


if __name__ == "__main__":
    sys.exit(main())
