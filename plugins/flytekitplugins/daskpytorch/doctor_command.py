"""Command that checks whether gangs can train here and on a cluster: `daskpytorch doctor`."""

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict

import click

from flytekitplugins.daskpytorch.checks import MAX_SECONDS, is_seconds
from flytekitplugins.daskpytorch.command_line import scheduler_option
from flytekitplugins.daskpytorch.doctor import Finding, examine


def _timeout(text: str) -> float:
    with contextlib.suppress(ValueError):
        if is_seconds(seconds := float(text)):
            return seconds
    raise click.BadParameter(f"{text!r}: must be seconds above 0 and at most {MAX_SECONDS}")


@click.command(short_help="Check whether gangs can train here and on a Dask cluster.")
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
def doctor(*, scheduler: str | None, gang: bool, timeout: float, is_json: bool) -> int:
    """Check whether gangs can train on this machine and on a Dask cluster.

    The checks cover versions, GPUs, addresses, and a test gang of two ranks. Exit code 1 if there is a problem.
    """
    findings = examine(scheduler, with_gangs=gang, timeout=timeout)
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
