"""How well many models are packed onto one cluster, and what each costs besides its training, beside Ray Tune.

    pip install '.[bench]'                              # Ray; without it, --skip ray
    python benchmarks/many.py                           # three rounds, some nine minutes, a table at the end
    python benchmarks/many.py --quick --skip ray        # one small round: does it still run?

27 experiments of fake work of equal length take one, two or four workers each, on four workers. The best packing of
them is known: all of size four alone, the others side by side without a gap. Its makespan is the measure. Every round
runs the same grid by `dispatch.map` and by Ray Tune (a placement group per trial), in turn, on clusters that are up.
The cost of a model is the time of many that do nothing, divided by their number: starting, meeting, ending.

Ranks are processes that form a process group; Ray Tune's trials are functions in actors that do not. The ranks of one
gang share this machine's cores, as their start does, so the fewer the cores, the dearer a large gang.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from importlib.util import find_spec
from pathlib import Path

from launch import machine
from running import Cluster, Program, nothing_left

NUM_WORKERS = 4
NUM_EXPERIMENTS = 27
SIZES = (1, 2, 4)
TIME_LIMIT = 1200.0
"""Seconds for one grid."""

SERVE = """
import json
import os
import sys
import time
import psutil

def serve(run):
    print("@ready", flush=True)
    for line in sys.stdin:
        grid = json.loads(line)
        began = time.monotonic()
        done = run(grid)
        seconds = time.monotonic() - began
        if sorted(done) != list(range(len(grid))):
            raise ValueError(f"{len(done)} of {len(grid)} experiments came back")
        print("@done", seconds, psutil.Process().memory_info().rss, flush=True)
"""

DASK = f"""{SERVE}
from distributed import Client
from flytekitplugins.daskpytorch import dispatch

def work(experiment):
    time.sleep(experiment["seconds"])
    return experiment["index"]

with Client(scheduler_file=sys.argv[1]) as client:
    serve(lambda grid: dispatch.map(client, work, grid, workers=lambda experiment: experiment["size"]).result())
"""

RAY = f"""{SERVE}
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
serve(run)
ray.shutdown()
"""


def grid_of(sizes: list[int], seconds: float) -> list[dict[str, float]]:
    """Experiments of these sizes."""
    return [{"index": index, "size": size, "seconds": seconds} for index, size in enumerate(sizes)]


def best_makespan(sizes: list[int], seconds: float) -> float:
    """Of the best packing onto four workers: those of size four one by one, then pairs and singles without a gap."""
    small = 2 * sizes.count(2) + sizes.count(1)
    return seconds * (sizes.count(4) + -(-small // NUM_WORKERS))


def run(program: Program, grid: list[dict[str, float]]) -> tuple[float, int]:
    """Have a grid done; seconds, and bytes of the driver's memory."""
    program.tell(json.dumps(grid))
    seconds, memory = program.hear("done", TIME_LIMIT).split()
    return float(seconds), int(memory)


def chosen(folder: Path, contact: str, skipped: list[str]) -> dict[str, Program]:
    """Who takes part."""
    programs = {"dispatch.map": Program.of(DASK, folder / "dask", contact)}
    if "ray" not in skipped:
        if find_spec("ray") is None:
            raise SystemExit("Ray is not installed: pip install '.[bench]', or --skip ray")
        temporary = folder / "ray-tmp"  # short, for the names of Ray's sockets
        temporary.mkdir()
        programs["Ray Tune"] = Program.of(RAY, folder / "ray", environment={"TMPDIR": str(temporary)})
    return programs


def measure_packing(programs: dict[str, Program], sizes: list[int], seconds: float, rounds: int) -> list[str]:
    """The rows of the table that compares makespans."""
    best = best_makespan(sizes, seconds)
    times: dict[str, list[float]] = {name: [] for name in programs}
    for number in range(1, rounds + 1):
        for name, program in programs.items():
            times[name].append(run(program, grid_of(sizes, seconds))[0])
            print(f"round {number}: {name} {times[name][-1]:.1f} s", file=sys.stderr)
    count = ", ".join(f"{sizes.count(size)} of {size}" for size in SIZES)
    rows = [f"{len(sizes)} experiments ({count} workers) of {seconds:g} s; the best packing takes {best:g} s"]
    for name, taken in times.items():
        median = statistics.median(taken)
        rows.append(
            f"| {name} | {median:.1f} s | {min(taken):.1f}-{max(taken):.1f} s | {median / best:.3f} x the best |"
        )
    return rows


def measure_cost(program: Program, count: int) -> list[str]:
    """What a model costs besides its training."""
    before = run(program, grid_of([1] * 8, 0.0))[1]
    seconds, after = run(program, grid_of([1] * count, 0.0))
    cost, grown = 1000 * seconds / count, (after - before) / 2**20
    return [f"{count} experiments that do nothing: {cost:.1f} ms each; the driver's memory grew by {grown:.1f} MiB"]


def main() -> None:
    """Measure, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count (default: 3)")
    parser.add_argument("--work", type=float, default=3.0, help="seconds of fake work per experiment (default: 3)")
    parser.add_argument("--trivial", type=int, default=1000, help="experiments that do nothing (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="decides the sizes (default: 0)")
    parser.add_argument("--skip", nargs="*", default=[], choices=["ray"], help="peers to leave out")
    parser.add_argument("--quick", action="store_true", help="one round, little work")
    asked = parser.parse_args()
    if asked.quick:
        asked.rounds, asked.work, asked.trivial = 1, 1.0, 50
    sizes = random.Random(asked.seed).choices(SIZES, k=NUM_EXPERIMENTS)
    with nothing_left("many") as folder:
        cluster = Cluster(folder / "cluster", NUM_WORKERS)
        programs = chosen(folder, cluster.contact, asked.skip)
        for name, program in programs.items():
            program.hear("ready")
            run(program, grid_of([1] * 8, 0.0))
            print(f"{name} is warm", file=sys.stderr)
        rows = measure_packing(programs, sizes, asked.work, asked.rounds)
        rows += measure_cost(programs["dispatch.map"], asked.trivial)
        cluster.close()
    print("\n".join([machine(), *rows]))


if __name__ == "__main__":
    main()
