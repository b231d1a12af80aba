"""A large argument and a large return value: how long they take, and what they cost in memory, beside their peers.

    pip install '.[bench]'                                # Ray; without it, --skip ray
    python benchmarks/arguments.py                        # 300 MB, 2 and 8 ranks, three rounds, some eight minutes
    python benchmarks/arguments.py --quick --skip ray     # 20 MB, 2 ranks, one round: does it still run?

An array of bytes goes to all ranks of one machine, each of which reads a byte of every page of it; then rank 0 returns
another one of that size, which the caller reads likewise. Given are the seconds from the call until the last rank has
read its argument, those from rank 0's `return` until the caller has read what it returned, and what a rank's memory
grows by: its proportional set size (PSS), in which what several processes share counts for each in equal parts, while
all hold the argument, less that of a call with a byte. The seconds of such a call stand beside: they are the start of
the ranks, which is not the argument's.

Each round has every way once, in turn, on clusters that are up and have run before:

dispatch.run   on a Dask cluster with a worker for all ranks
mp.spawn       `torch.multiprocessing.spawn`; what rank 0 returns comes by a `SimpleQueue`
Ray Train      the argument is put into Ray's store within the call, and all ranks get it from there
scatter        Dask's `scatter(broadcast=True)`, and a task for each worker: no gang, but processes that are there

This process imports nothing but the standard library; what is measured runs in processes of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from figures import Figure, Goal, reported
from launch import machine
from running import Cluster, Program, nothing_left

WHATS = {"argument": "s", "return value": "s", "memory": "MB", "a byte": "s"}
"""What is measured, in which unit."""
GROWTH = 1.5
"""Of the argument's size: what all ranks of a machine together may grow by."""
TIME_LIMIT = 300.0
"""Seconds for one call."""

WORK = """
import json
import sys
import time
from pathlib import Path
import numpy

def note(folder, what, rank, value):
    unfinished = Path(folder, f".{what}-{rank}")
    unfinished.write_text(json.dumps(value))
    unfinished.rename(Path(folder, f"{what}-{rank}"))

def wait_for(folder, what, count):
    while len(list(Path(folder).glob(f"{what}-*"))) < count:
        time.sleep(0.005)

def share_of_memory():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024

def touched(array):
    if (found := int(array[::4096].sum())) != -(-array.size // 4096):
        raise ValueError(f"{array.size} bytes, of which {found} pages are right")

def work(array, rank, count, folder):
    touched(array)
    note(folder, "touched", rank, time.time())
    wait_for(folder, "touched", count)
    note(folder, "memory", rank, share_of_memory())
    wait_for(folder, "memory", count)
    if rank:
        return None
    returned = numpy.ones(array.size, dtype=numpy.uint8)
    note(folder, "returns", 0, time.time())
    return returned

def serve(call):
    print("@ready", flush=True)
    for line in sys.stdin:
        count, size, folder = json.loads(line)
        array = numpy.ones(size, dtype=numpy.uint8)
        began = time.time()
        touched(call(array, count, folder))
        ended = time.time()
        noted = lambda what: [json.loads(path.read_text()) for path in Path(folder).glob(f"{what}-*")]
        if not len(noted("touched")) == len(noted("memory")) == count:
            raise ValueError(f"{len(noted('touched'))} of {count} ranks")
        found = max(noted("touched")) - began, ended - noted("returns")[0], max(noted("memory"))
        print("@done", json.dumps(found), flush=True)
"""
"""What all ranks do, and who calls them."""

GANG = f"""{WORK}
from distributed import Client
from flytekitplugins.daskpytorch import Gang, current_rank, dispatch

def rank(array, folder):
    return work(array, current_rank().rank, current_rank().world_size, folder)

def call(array, count, folder):
    return dispatch.run(client, rank, array, folder, gang=Gang(ranks_per_worker=count)).result()[0]

with Client(scheduler_file=sys.argv[1]) as client:
    serve(call)
"""

SCATTER = f"""{WORK}
from distributed import Client, wait

def call(array, count, folder):
    workers = list(client.scheduler_info(n_workers=-1)["workers"])
    scattered = client.scatter(array, broadcast=True, hash=False)  # else calls share a key, which one of them lets go
    ranks = [
        client.submit(work, scattered, rank, count, folder, workers=[workers[rank]], pure=False)
        for rank in range(count)
    ]
    wait(ranks)
    return ranks[0].result()

with Client(scheduler_file=sys.argv[1]) as client:
    serve(call)
"""

SPAWN = f"""{WORK}
import torch.multiprocessing

def rank(index, array, count, folder, returned):
    value = work(array, index, count, folder)
    if value is not None:
        returned.put(value)

def call(array, count, folder):
    returned = torch.multiprocessing.get_context("spawn").SimpleQueue()
    ranks = torch.multiprocessing.spawn(rank, args=(array, count, folder, returned), nprocs=count, join=False)
    value = returned.get()
    while not ranks.join():
        pass
    return value

if __name__ == "__main__":
    serve(call)
"""

RAY = f"""{WORK}
import os
import ray
import ray.train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

def rank(config):
    return work(ray.get(config["array"]), ray.train.get_context().get_world_rank(), config["count"], config["folder"])

def call(array, count, folder):
    trainer = TorchTrainer(
        rank,
        train_loop_config={{"array": ray.put(array), "count": count, "folder": folder}},
        scaling_config=ScalingConfig(num_workers=count, use_gpu=False),
        run_config=RunConfig(storage_path=os.path.join(os.environ["TMPDIR"], "results")),
    )
    return trainer.fit().return_value

folder = os.path.join(os.environ["TMPDIR"], "ray")
ray.init("local", num_cpus=int(sys.argv[1]) + 1, include_dashboard=False, _temp_dir=folder)
serve(call)
ray.shutdown()
"""

Found = dict[str, list[float]]
"""By what was measured, a number for each round."""


def programs(folder: Path, count: int, skipped: list[str]) -> Iterator[tuple[str, Program]]:
    """Who takes part, with clusters of their own."""
    yield "dispatch.run", Program.of(GANG, folder / "gang", Cluster(folder / "gang-cluster", 1).contact)
    yield "mp.spawn", Program.of(SPAWN, folder / "spawn")
    if "ray" not in skipped:
        temporary = folder / "tmp"  # short, for the names of Ray's sockets
        temporary.mkdir()
        environment = {"TMPDIR": str(temporary), "RAY_USAGE_STATS_ENABLED": "0"}
        yield "Ray Train", Program.of(RAY, folder / "ray", str(count), environment=environment)
    if "scatter" not in skipped:
        contact = Cluster(folder / "scatter-cluster", count).contact
        yield "scatter", Program.of(SCATTER, folder / "scatter", contact)


def called(program: Program, count: int, size: int, folder: Path) -> tuple[float, float, float]:
    """Seconds until all have read their argument, and for what rank 0 returns; a rank's bytes of memory."""
    folder.mkdir(parents=True)
    program.tell(json.dumps([count, size, str(folder)]))
    argument, returned, memory = json.loads(program.hear("done", TIME_LIMIT))
    return argument, returned, memory


def measure(count: int, size: int, rounds: int, skipped: list[str]) -> dict[str, Found]:
    """What each way takes, by its name."""
    found: dict[str, Found] = {}
    with nothing_left("arguments") as folder:
        ways = dict(programs(folder, count, skipped))
        least = {}
        for name, program in ways.items():
            program.hear("ready")
            called(program, count, 1, folder / name / "warms up")
            start, _, least[name] = called(program, count, 1, folder / name / "a byte")
            found[name] = {what: [] for what in WHATS} | {"a byte": [start]}
        for number in range(1, rounds + 1):
            for name, program in ways.items():
                argument, returned, memory = called(program, count, size, folder / name / str(number))
                found[name]["argument"].append(argument)
                found[name]["return value"].append(returned)
                found[name]["memory"].append((memory - least[name]) / 1e6)
                print(f"round {number}, {count} ranks: {name} {argument:.2f} s, {returned:.2f} s", file=sys.stderr)
    return found


def figures(found: dict[str, Found], count: int, megabytes: float) -> Iterator[Figure]:
    """What was to be reached, and what was: sooner than any, and the ranks of a machine share one copy."""
    ours = found["dispatch.run"]
    goal = Goal(bound=GROWTH * megabytes / count, of="here", at_most=True)
    for peer, theirs in found.items():
        if theirs is not ours:
            for what in ("argument", "return value"):
                described = f"{megabytes:g} MB as {what}, {count} ranks ({peer})"
                yield Figure.beside(peer, theirs[what], what=described, here=ours[what], goals=[Goal(bound=1.0)])
            described = f"{megabytes:g} MB as argument, {count} ranks: memory of a rank ({peer})"
            memory = {"here": ours["memory"], "unit": "MB", "goals": [goal]}
            yield Figure.beside(peer, theirs["memory"], share=True, what=described, **memory)


def table(found: dict[str, Found], count: int, megabytes: float) -> Iterator[str]:
    """Every way with all that was measured."""
    yield f"| {megabytes:g} MB, {count} ranks | argument | return value | memory of a rank | start with a byte |"
    yield "|---|---|---|---|---|"
    for name, numbers in found.items():
        yield f"| {name} | {' | '.join(cell(numbers[what], unit) for what, unit in WHATS.items())} |"


def cell(values: list[float], unit: str) -> str:
    """The median, and from where to where they go."""
    digits = 0 if unit == "MB" else 2
    least, greatest = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return f"{statistics.median(values):.{digits}f} {unit} ({least}-{greatest})"


def main() -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=300.0, metavar="MB", help="of the array (default: 300)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8], metavar="N", help="(default: 2 8)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds that count (default: 3)")
    parser.add_argument("--skip", nargs="*", default=[], choices=["ray", "scatter"], help="peers to leave out")
    parser.add_argument("--quick", action="store_true", help="small: does it still run?")
    asked = parser.parse_args()
    if asked.quick:
        asked.size, asked.ranks, asked.rounds = 20.0, [2], 1
    if "ray" not in asked.skip and find_spec("ray") is None:
        raise SystemExit("Ray is not installed: pip install '.[bench]', or --skip ray")
    on_what, lines = machine(), []
    for count in asked.ranks:
        found = measure(count, int(asked.size * 1e6), asked.rounds, asked.skip)
        lines += [*table(found, count, asked.size), "", *reported(figures(found, count, asked.size)), ""]
    print(on_what, "", *lines, sep="\n")


if __name__ == "__main__":
    main()
