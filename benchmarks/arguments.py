"""Measure the time of a large argument and a large return value, beside Ray Train.

    pip install '.[bench]'                                # Ray, for its row
    python benchmarks/arguments.py                        # 300 MB, 8 ranks, three rounds, about five minutes
    python benchmarks/arguments.py --quick                # 20 MB, 2 ranks, one round, as a trial

All ranks of one machine receive an array of bytes, and each reads a byte of every page. Then rank 0 returns an array of
the same size, which the caller reads in the same way. The benchmark measures the seconds from the call until the last
rank has read its argument. The second measure is the seconds from rank 0's `return` until the caller has read the
value.

Each round runs each way once, in turn, on clusters that have run before:

gang           `dispatch.run` on a Dask cluster with a worker for all ranks
Ray Train      the argument goes into Ray's store within the call, and all ranks get it from there

This process imports only the standard library. Other processes run the measured programs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from figures import Figure, at_least, report
from running import SERVE, Cluster, Program, asked, nothing_left, take_turns

TIME_LIMIT = 300.0
"""Timeout for one call, in seconds."""

WORK = f"""{SERVE}
import time
from pathlib import Path
import numpy

def note(folder, what, rank, value):
    unfinished = Path(folder, f".{{what}}-{{rank}}")
    unfinished.write_text(json.dumps(value))
    unfinished.rename(Path(folder, f"{{what}}-{{rank}}"))

def wait_for(folder, what, count):
    while len(list(Path(folder).glob(f"{{what}}-*"))) < count:
        time.sleep(0.005)

def touched(array):
    if (found := int(array[::4096].sum())) != -(-array.size // 4096):
        raise ValueError(f"{{array.size}} bytes, of which {{found}} pages are right")

def work(array, rank, count, folder):
    touched(array)
    note(folder, "touched", rank, time.time())
    wait_for(folder, "touched", count)
    if rank:
        return None
    returned = numpy.ones(array.size, dtype=numpy.uint8)
    note(folder, "returns", 0, time.time())
    return returned

def measured(call, count, size, folder):
    array = numpy.ones(size, dtype=numpy.uint8)
    began = time.time()
    touched(call(array, count, folder))
    ended = time.time()
    noted = lambda what: [json.loads(path.read_text()) for path in Path(folder).glob(f"{{what}}-*")]
    if len(noted("touched")) != count:
        raise ValueError(f"{{len(noted('touched'))}} of {{count}} ranks")
    return max(noted("touched")) - began, ended - noted("returns")[0]
"""
"""Part of the programs: the work of the ranks, and of their caller."""

GANG = f"""{WORK}
from distributed import Client
from flytekitplugins.daskpytorch import Gang, current_rank, dispatch

def rank(array, folder):
    return work(array, current_rank().rank, current_rank().world_size, folder)

def call(array, count, folder):
    return dispatch.run(client, rank, array, folder, gang=Gang(ranks_per_worker=count)).result()[0]

with Client(scheduler_file=sys.argv[1]) as client:
    serve(lambda *order: measured(call, *order))
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
serve(lambda *order: measured(call, *order))
"""

PEER = "Ray Train"
Taken = tuple[float, float]
"""Seconds until all ranks have read the argument, and seconds of the return value."""


def started(way: str, count: int, folder: Path) -> Program:
    """Start a contestant with its own cluster."""
    if way == PEER:
        temporary = folder / "tmp"  # short, for the names of Ray's sockets
        temporary.mkdir()
        return Program.serving(RAY, folder / "ray", str(count), environment={"TMPDIR": str(temporary)})
    return Program.serving(GANG, folder / "gang", Cluster(folder / "cluster", 1).contact)


def caller(program: Program, count: int, size: int, folder: Path) -> Callable[[], Taken]:
    """Return the turn of a contestant."""
    numbers = iter(range(1_000_000))

    def call(size: int) -> Taken:
        (here := folder / str(next(numbers))).mkdir(parents=True)
        argument, returned = program.call(count, size, str(here), timeout=TIME_LIMIT)
        return argument, returned

    call(1)  # warms up
    return lambda: call(size)


def figures(found: dict[str, list[Taken]], count: int, megabytes: float) -> Iterator[Figure]:
    """Yield the rows: times beside the peer."""
    named = f"{megabytes:g} MB as {{}}, {count} ranks"
    arguments, returned = zip(*found["gang"], strict=True)
    if theirs := list(zip(*found.get(PEER, ()), strict=True)):
        for what, here, its in (("argument", arguments, theirs[0]), ("return value", returned, theirs[1])):
            row = {"what": f"{named.format(what)}, beside {PEER}", "here": here, "goals": at_least(1)}
            yield Figure.beside(PEER, its, **row)


def main() -> None:
    """Measure, and print the table."""
    options = {"rounds": (3, 1, "rounds that count"), "ranks": (8, 2, "ranks"), "size": (300.0, 20.0, "megabytes")}
    arguments = asked(__doc__, ("gang", PEER), **options)
    with nothing_left("arguments") as folder:
        programs = {way: started(way, arguments.ranks, folder) for way in arguments.ways}
        order = arguments.ranks, int(arguments.size * 1e6)
        ways = {way: caller(program, *order, folder / f"calls of {way}") for way, program in programs.items()}
        found = take_turns(ways, arguments.rounds, uncounted=0)
    report(figures(found, arguments.ranks, arguments.size), arguments.on)


if __name__ == "__main__":
    main()
