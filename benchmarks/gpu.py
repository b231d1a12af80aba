"""All that is to be measured on a machine with GPUs, by one command, as one Markdown page.

    python benchmarks/gpu.py                              # within ten minutes; needs nothing from the network
    python benchmarks/gpu.py --minutes 20 --to gpu.md     # longer, with many GPUs; and into a file
    python benchmarks/gpu.py --quick                      # small: does it still run? Without GPUs, too, and says so

It runs the other benchmarks one after the other, each with a rank per GPU and nccl, also where there is one GPU:

devices     what ranks see of the GPUs, each its own or all, and whether what the tests make up is so on real ones
launch      how long until the first all-reduce: warm and first gangs beside `torchrun`
training    the throughput of 1, 2, 4, ... ranks beside `torchrun`, and what supervision and checkpoints cost
recipe      the pet-names recipe beside the one that is usually written, by the time to the same loss
decoding    JPEGs per second that become tensors, by PIL, by torchcodec, and by its nvJPEG on the GPU

The first table says what became of each; what they print follows. If one fails, or is not done in its share of the
time, the others go on, and the exit code is 1. Without GPUs they run on the CPU, with gloo.

This process imports nothing but the standard library; what is measured runs in processes of its own.
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
"""Scripts and their options; the backend's name is added to the first's."""
FAREWELL = 20.0
"""Seconds for a part to end what it has started, once it is told to."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one part."""

    command: str
    seconds: float
    failure: str
    """Empty where it is done."""
    output: str

    @property
    def row(self) -> str:
        """A line of the table."""
        said = f"**failed**: {self.failure.replace('|', '/')}" if self.failure else "done"
        return f"| `{self.command}` | {self.seconds:.0f} s | {said} |"

    @property
    def section(self) -> str:
        """What it has printed, below a heading."""
        return f"## {self.command.split()[1]}\n\n{self.output.strip() or self.failure}\n"


def run(part: list[str], limit: float) -> Outcome:
    """Run one benchmark; what it says of its progress is passed on."""
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
            talk.join(1)  # what it has started may still hold its standard error
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
    """Show what it writes, and keep the last line."""
    for line in lines:
        sys.stderr.write(line)
        last.append(line.strip() or last[0])


def put_down(process: subprocess.Popen[str]) -> None:
    """End it, with time to end what it has started."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(FAREWELL)
    process.kill()
    process.wait()


def page(outcomes: list[Outcome], on_what: str) -> str:
    """A Markdown page."""
    lines = ["# Measured on GPUs" if gpus() else "# There is no GPU here: small sizes on the CPU, with gloo", ""]
    lines += [on_what, "", "| command | took | |", "|---|---|---|", *(outcome.row for outcome in outcomes), ""]
    return "\n".join([*lines, *(outcome.section for outcome in outcomes)])


def main() -> None:
    """Run all parts, and print what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, metavar="N", help="for all of it (default: 10)")
    parser.add_argument("--to", type=Path, metavar="FILE", help="write the page there, too")
    parser.add_argument("--quick", action="store_true", help="small: does it still run?")
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
        limit = max(1.0, deadline - time.monotonic()) / (len(PARTS) - number)  # what one leaves is for the next
        outcomes.append(run([name, *options], limit))
    text = page(outcomes, on_what)
    print(text, end="")
    if arguments.to:
        arguments.to.write_text(text)
    sys.exit(any(outcome.failure for outcome in outcomes))


if __name__ == "__main__":
    main()
