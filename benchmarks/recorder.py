"""What torch's flight recorder costs a collective, by how many it remembers.

    python benchmarks/recorder.py                # a hundred rounds, half a minute
    python benchmarks/recorder.py --quick        # one round: does it still run?

The recorder is on by itself in a recent torch, with room for 2000; ranks of a gang have it remember 64, or what
`TORCH_FR_BUFFER_SIZE` says. Each contestant is a process with a process group of its own (gloo), which waits for its
turn; in each round each makes 1000 all-reduces of four numbers, in an order drawn anew. A group of one exchanges
nothing, so what is left is what torch does around a collective, the recorder included. Differences are taken within a
round.

This process imports nothing but the standard library.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator

from figures import Figure, reported
from launch import machine

SIZES = ("0", "64", "2000")
ROUNDS = 100
RANK = """
import sys, time
import torch
from torch import distributed

distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
numbers = torch.zeros(4)
for _ in sys.stdin:
    began_at = time.perf_counter()
    for _ in range(1000):
        distributed.all_reduce(numbers)
    print((time.perf_counter() - began_at) / 1000, flush=True)
"""


def start(size: str) -> subprocess.Popen[str]:
    """A process whose recorder has so much room."""
    environment = os.environ | {"TORCH_FR_BUFFER_SIZE": size, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RANK]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def take_turn(rank: subprocess.Popen[str]) -> float:
    """Seconds of an all-reduce."""
    assert rank.stdin is not None
    assert rank.stdout is not None
    print(file=rank.stdin, flush=True)
    return float(rank.stdout.readline())


def measure(num_rounds: int) -> list[dict[str, float]]:
    """Seconds of an all-reduce by room, in each round."""
    ranks = {size: start(size) for size in SIZES}
    rng = random.Random(0)
    try:
        for rank in ranks.values():  # not counted: torch's first steps
            take_turn(rank)
        return [{size: take_turn(ranks[size]) for size in rng.sample(SIZES, len(SIZES))} for _ in range(num_rounds)]
    finally:
        for rank in ranks.values():
            rank.kill()
            rank.communicate()


def table(rounds: list[dict[str, float]]) -> Iterator[str]:
    """The lines of a Markdown table."""
    yield "| collectives remembered | an all-reduce in a group of one | more than with none (quartiles) |"
    yield "|---|---|---|"
    for size in SIZES:
        seconds = statistics.median(turns[size] for turns in rounds)
        more = [1e6 * (turns[size] - turns["0"]) for turns in rounds]
        low, middle, high = quartiles(more) if len(more) > 1 else more * 3
        yield f"| {size} | {seconds * 1e6:.1f} µs | {middle:+.1f} µs ({low:+.1f} … {high:+.1f}) |"


def figures(rounds: list[dict[str, float]]) -> Iterator[Figure]:
    """What a recorder of our size costs beside torch's own; the quartiles, since its extremes are the machine's."""
    ours, theirs = (quartiles([1e6 * (turns[size] - turns["0"]) for turns in rounds]) for size in SIZES[1:])
    what = "torch's flight recorder, remembering 64: a collective costs more (quartiles)"
    yield Figure(what=what, here=ours, unit="µs", peer="remembering 2000", theirs=theirs)


def quartiles(values: list[float]) -> list[float]:
    """The three of them; of one round, that."""
    return statistics.quantiles(values, n=4) if len(values) > 1 else values


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round")
    arguments = parser.parse_args()
    here = machine()
    rounds = measure(1 if arguments.quick else ROUNDS)
    print(*table(rounds), "", f"{here}.", *reported(figures(rounds)), sep="\n")


if __name__ == "__main__":
    main()
