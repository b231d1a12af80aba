"""Measure the packing of many models onto one cluster, and the cost of each beside its training, beside Ray Tune.

    pip install '.[bench]'                              # Ray, for its row
    python benchmarks/many.py                           # three rounds of three mixes, half an hour
    python benchmarks/many.py --quick                   # one small round, as a trial

The 27 experiments do fake work of equal length and take one, two or four workers each. The cluster has four workers,
and the benchmark has three mixes. The best packing is known: experiments of size four run alone, and the others side by
side without a gap. The measure is the makespan beside that of the best packing. Each round runs the same grid by
`dispatch.map` and by Ray Tune (a placement group per trial), in turn, on running clusters.

The cost of a model is the time of many models that do nothing, divided by their number. The cost covers start,
rendezvous and end.

Our ranks are processes that form a process group. Ray Tune's trials are functions in actors without a process group.
The ranks of a gang start on this machine's shared cores, so large gangs cost more on fewer cores.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

from figures import Figure, at_most, report
from running import SERVE, Cluster, Program, asked, nothing_left, take_turns

NUM_WORKERS = 4
NUM_EXPERIMENTS = 27
SIZES = (1, 2, 4)
TIME_LIMIT = 1200.0
"""Timeout for one grid, in seconds."""

TIMED = f"""{SERVE}
import os
import time

def timed(run, grid):
    began = time.monotonic()
    done = run(grid)
    seconds = time.monotonic() - began
    if sorted(done) != list(range(len(grid))):
        raise ValueError(f"{{len(done)}} of {{len(grid)}} experiments came back")
    return seconds
"""

DASK = f"""{TIMED}
from distributed import Client
from flytekitplugins.daskpytorch import dispatch

def work(experiment):
    time.sleep(experiment["seconds"])
    return experiment["index"]

with Client(scheduler_file=sys.argv[1]) as client:
    run = lambda grid: dispatch.map(client, work, grid, workers=lambda experiment: experiment["size"]).result()
    serve(lambda grid: timed(run, grid))
"""

RAY = f"""{TIMED}
import ray
from ray import tune

def work(config):
    time.sleep(config["experiment"]["seconds"])
    tune.report({{"index": config["experiment"]["index"]}})

def run(grid):
    resources = lambda config: tune.PlacementGroupFactory([{{"CPU": 1}}] * config["experiment"]["size"])
    tuner = tune.Tuner(
        tune.with_resources(work, resources),
        param_space={{"experiment": tune.grid_search(sorted(grid, key=lambda e: -e["size"]))}},
        run_config=tune.RunConfig(storage_path=os.path.join(os.environ["TMPDIR"], "results"), verbose=0),
    )
    return [result.metrics["index"] for result in tuner.fit()]

folder = os.path.join(os.environ["TMPDIR"], "ray")
ray.init("local", num_cpus={NUM_WORKERS}, include_dashboard=False, _temp_dir=folder)
serve(lambda grid: timed(run, grid))
"""


def grid_of(sizes: list[int], seconds: float) -> list[dict[str, float]]:
    """Return a grid of experiments of these sizes."""
    return [{"index": index, "size": size, "seconds": seconds} for index, size in enumerate(sizes)]


def best_makespan(sizes: list[int], seconds: float) -> float:
    """Return the makespan of the best packing: those of size four one by one, then the others without a gap."""
    small = 2 * sizes.count(2) + sizes.count(1)
    return seconds * (sizes.count(4) + -(-small // NUM_WORKERS))


def run(program: Program, grid: list[dict[str, float]]) -> float:
    """Run a grid, and return its seconds."""
    return float(program.call(grid, timeout=TIME_LIMIT))


def figures(folder: Path, arguments: argparse.Namespace) -> Iterator[Figure]:
    """Measure, and yield the rows: the makespan of the mixes, and the cost of a model."""
    cluster = Cluster(folder / "cluster", NUM_WORKERS)
    programs = {"dispatch.map": Program.serving(DASK, folder / "dask", cluster.contact)}
    if "Ray Tune" in arguments.ways:
        (temporary := folder / "r").mkdir()  # short, for the names of Ray's sockets
        programs["Ray Tune"] = Program.serving(RAY, folder / "ray", environment={"TMPDIR": str(temporary)})
    for program in programs.values():
        run(program, grid_of([1] * 8, 0.0))
    shares: dict[str, list[float]] = {name: [] for name in programs}
    for seed in arguments.seeds:
        sizes = random.Random(seed).choices(SIZES, k=NUM_EXPERIMENTS)
        grid, best = grid_of(sizes, arguments.work), best_makespan(sizes, arguments.work)
        ways = {name: lambda it=program: run(it, grid) / best for name, program in programs.items()}  # noqa: B023
        for name, taken in take_turns(ways, arguments.rounds, uncounted=0).items():
            shares[name] += taken
    what = (
        f"{NUM_EXPERIMENTS} models of 1, 2 and 4 workers, {arguments.work:g} s each: makespan beside the best packing"
    )
    row = {"what": what, "here": shares["dispatch.map"], "unit": "×", "goals": at_most(1.08, "here")}
    if theirs := shares.get("Ray Tune"):
        yield Figure.beside("Ray Tune", theirs, share=True, **row)
    else:
        yield Figure(**row)
    nothing = grid_of([1] * arguments.trivial, 0.0)
    costs = [1000 * run(programs["dispatch.map"], nothing) / len(nothing) for _ in range(arguments.rounds)]
    what = f"a model that does nothing, one of {len(nothing)}"
    yield Figure(what=what, here=costs, unit="ms", goals=at_most(30, "here"))


def main() -> None:
    """Measure, and print the table."""
    arguments = asked(
        __doc__,
        ("dispatch.map", "Ray Tune"),
        rounds=(3, 1, "rounds that count"),
        work=(3.0, 1.0, "seconds of fake work of an experiment"),
        trivial=(1000, 50, "experiments that do nothing"),
        seeds=([0, 1, 2], [0], "seeds of the mixes of sizes"),
    )
    with nothing_left("many") as folder:
        found = list(figures(folder, arguments))
    report(found, arguments.on)


if __name__ == "__main__":
    main()
