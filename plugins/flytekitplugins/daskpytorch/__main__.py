"""Command that checks whether gangs can train here and on a cluster: `python -m flytekitplugins.daskpytorch`.

`python -m flytekitplugins.daskpytorch profile` requests a flame graph of a running rank. `daskpytorch run` runs a
script in ranks, and `daskpytorch attach` opens a rank's debugger. `daskpytorch` stands for `python -m
flytekitplugins.daskpytorch`.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict

from flytekitplugins.daskpytorch import doctor, flame_graphs
from flytekitplugins.daskpytorch.doctor import Finding
from flytekitplugins.daskpytorch.errors import GangStartError
from flytekitplugins.daskpytorch.settings import SCHEDULER_VARIABLE


def main(arguments: Sequence[str] | None = None) -> int:
    """Check this machine and a cluster, print the findings, and return the exit code: 1 after a problem, else 0."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] == ["profile"]:
        return _profile(words[1:])
    if words[:1] == ["run"]:
        from flytekitplugins.daskpytorch import run_command

        return run_command.main(words[1:])
    if words[:1] == ["attach"]:
        from flytekitplugins.daskpytorch import attach_command

        return attach_command.main(words[1:])
    options = _parser().parse_args(words)
    findings = doctor.examine(options.scheduler, with_gangs=options.gang, timeout=options.timeout)
    if options.json:
        found = list(findings)
        print(json.dumps([asdict(finding) for finding in found], indent=2))
    else:
        found = list(_shown(findings))
    return int(any(finding.verdict == "problem" for finding in found))


def _profile(words: Sequence[str]) -> int:
    """Request a flame graph of a running rank. Return the exit code: 0 if a rank took the request, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m flytekitplugins.daskpytorch profile",
        description="Records a flame graph of a running rank with py-spy, on this machine or on a Dask cluster. The "
        "picture is stored among the gang's results, as profiles/rank-0-flame-graph-....svg, and the gang's log names "
        "it. Exit code 1 if no such rank runs.",
    )
    parser.add_argument("--rank", type=int, default=0, help="rank to record (default: 0)")
    parser.add_argument(
        "--seconds",
        type=int,
        default=10,
        choices=range(1, 601),
        metavar="1...600",
        help="length of the recording, in seconds (default: 10)",
    )
    _add_scheduler(parser, "record a rank on the workers of this Dask scheduler")
    options = parser.parse_args(words)
    try:
        count = flame_graphs.ask(options.rank, options.seconds, options.scheduler)
    except (OSError, GangStartError) as error:
        print(
            f"the scheduler at {options.scheduler} does not answer: {error}. Check the address, and the scheduler's "
            "log.",
            file=sys.stderr,
        )
        return 1
    where = f"on the workers of {options.scheduler}" if options.scheduler else "on this machine"
    if count == 0:
        print(
            f"no gang of this user has a running rank {options.rank} {where}. Start the command while the gang trains; "
            "for ranks on a Dask cluster, give --scheduler ADDRESS.",
            file=sys.stderr,
        )
        return 1
    gangs = "1 gang" if count == 1 else f"{count} gangs"
    print(
        f"py-spy records rank {options.rank} of {gangs} {where} for {options.seconds} s. The gang's log then names the "
        "flame graph, or the error."
    )
    return 0


def _add_scheduler(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--scheduler",
        metavar="ADDRESS",
        default=os.environ.get(SCHEDULER_VARIABLE) or None,
        help=f"{what} (default: ${SCHEDULER_VARIABLE}, else none)",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flytekitplugins.daskpytorch",
        description="Checks whether gangs can train on this machine and on a Dask cluster: versions, GPUs, "
        "addresses, and a test gang of two ranks. Exit code 1 if there is a problem.",
    )
    _add_scheduler(parser, "also check the cluster of this Dask scheduler")
    parser.add_argument(
        "--no-gang", dest="gang", action="store_false", help="skip the test gang of two ranks, which takes seconds"
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=60.0,
        metavar="SECONDS",
        help="timeout for the test gang, and, up to 10 s, for the scheduler's answer (default: 60)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the findings as a JSON list of objects with what, value, verdict and advice",
    )
    return parser


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be seconds above 0")
    return seconds


def _shown(findings: Iterable[Finding]) -> Iterator[Finding]:
    for finding in findings:
        print(f"{finding.verdict:8} {finding.what:28} {finding.value}")
        if finding.advice:
            print(f"{'':37} {finding.advice}", flush=True)
        yield finding


if __name__ == "__main__":
    sys.exit(main())
