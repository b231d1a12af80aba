"""Run all benchmarks for machines with GPUs by one command, and print one Markdown page.

    python benchmarks/gpu.py                              # within ten minutes, without network access
    python benchmarks/gpu.py --minutes 20 --to gpu.md     # longer, for many GPUs, and into a file
    python benchmarks/gpu.py --quick                      # small trial, also without GPUs

The script runs the other benchmarks in turn, each with a rank per GPU and nccl, even on a single GPU:

devices     the GPUs that ranks see, each its own or all, to confirm the tests' simulated GPUs
launch      the time to the first all-reduce: warm and first gangs beside `torchrun`
training    the throughput of 1, 2, 4, ... ranks beside `torchrun`, and the cost of supervision and checkpoints
recipe      the pet-names recipe beside the usual one, by the time to the same loss
decoding    JPEGs per second that become tensors, by PIL, by torchcodec, and by nvJPEG on the GPU

The first table lists the outcome of each benchmark, and their outputs follow. If a benchmark fails or exceeds its share
of the time, the others still run, and the exit code is 1. Without GPUs, the benchmarks run on the CPU with gloo.

This process imports only the standard library. Other processes run the measured programs.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from figures import gpus, machine

BENCHMARKS = Path(__file__).resolve().parent
PARTS: tuple[tuple[str, ...], ...] = (
    ("devices.py",),
    ("launch.py", "--rounds", "3", "--backend"),
    ("training.py", "--starts", "2"),
    ("recipe.py",),
    ("decoding.py",),
)
"""Scripts with options. The script launch.py gets the backend's name as well."""
FAREWELL = 20.0
"""Seconds for a benchmark to end its processes after SIGTERM."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of one benchmark."""

    command: str
    seconds: float
    failure: str
    """Reason of the failure. Empty if the benchmark succeeded."""
    output: str

    @property
    def row(self) -> str:
        """Row of the table."""
        said = f"**failed**: {self.failure.replace('|', '/')}" if self.failure else "done"
        return f"| `{self.command}` | {self.seconds:.0f} s | {said} |"

    @property
    def section(self) -> str:
        """Output of the benchmark, below a heading."""
        return f"## {self.command.split()[1]}\n\n{self.output.strip() or self.failure}\n"


def run(part: list[str], limit: float) -> Outcome:
    """Run one benchmark, and pass on its standard error."""
    print(f"---- {' '.join(part)}, at most {limit:.0f} s", file=sys.stderr, flush=True)
    began = time.monotonic()
    last = deque(["it says nothing"], maxlen=1)
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, str(BENCHMARKS / part[0]), *part[1:]],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
        )
        talk = threading.Thread(target=pass_on, args=(process.stderr, last), daemon=True)
        talk.start()
        try:
            code = process.wait(limit)
            talk.join(1)  # its processes may keep the standard error open
            failure = f"exit code {code}: {last[0]}" if code else ""
        except subprocess.TimeoutExpired:
            failure = f"not done within {limit:.0f} s; it was at: {last[0]}"
        finally:
            put_down(process)
        output.seek(0)
        said = output.read()
    seconds = time.monotonic() - began
    return Outcome(command=f"python benchmarks/{shlex.join(part)}", seconds=seconds, failure=failure, output=said)


def pass_on(lines: IO[str], last: deque[str]) -> None:
    """Pass on the lines, and keep the last one."""
    for line in lines:
        sys.stderr.write(line)
        last.append(line.strip() or last[0])


def put_down(process: subprocess.Popen[str]) -> None:
    """End a benchmark, with time to end its own processes."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(FAREWELL)
    process.kill()
    process.wait()


def page(outcomes: list[Outcome], on_what: str) -> str:
    """Return the Markdown page."""
    lines = ["# Measured on GPUs" if gpus() else "# There is no GPU here: small sizes on the CPU, with gloo", ""]
    lines += [on_what, "", "| command | took | |", "|---|---|---|", *(outcome.row for outcome in outcomes), ""]
    return "\n".join([*lines, *(outcome.section for outcome in outcomes)])


def main() -> None:
    """Run all benchmarks, and print their outcomes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--minutes",
        type=float,
        default=10.0,
        metavar="N",
        help="time for all benchmarks together, in minutes (default: 10)",
    )
    parser.add_argument("--to", type=Path, metavar="FILE", help="also write the page to this file")
    parser.add_argument("--quick", action="store_true", help="smallest size, to check that the benchmarks still run")
    arguments = parser.parse_args()

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    deadline = time.monotonic() + 60 * arguments.minutes - FAREWELL
    on_what = machine()
    outcomes = []
    for number, (name, *options) in enumerate(PARTS):
        if name == "launch.py":
            options.append("nccl" if gpus() else "gloo")
        if arguments.quick or not gpus():
            options.append("--quick")
        limit = max(1.0, deadline - time.monotonic()) / (len(PARTS) - number)  # time that is left goes to the next
        outcomes.append(run([name, *options], limit))
    text = page(outcomes, on_what)
    print(text, end="")
    if arguments.to:
        arguments.to.write_text(text)
    sys.exit(any(outcome.failure for outcome in outcomes))


if __name__ == "__main__":
    main()
