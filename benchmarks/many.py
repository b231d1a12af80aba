"""How well many models are packed onto one cluster, and what each costs besides its training, beside Ray Tune.

    pip install '.[bench]'                              # Ray; without it, --skip ray
    python benchmarks/many.py                           # three rounds of three mixes, half an hour
    python benchmarks/many.py --quick --skip ray        # one small round: does it still run?

27 experiments of fake work of equal length take one, two or four workers each, on four workers, in three mixes. The
best packing of them is known: all of size four alone, the others side by side without a gap. Its makespan is the
measure. Every round runs the same grid by `dispatch.map` and by Ray Tune (a placement group per trial), in turn, on
clusters that are up. The cost of a model is the time of many that do nothing, divided by their number: starting,
meeting, ending; and the processor time that each kind of process spends on it.

Ranks are processes that form a process group; Ray Tune's trials are functions in actors that do not. The ranks of one
gang share this machine's cores, as their start does, so the fewer the cores, the dearer a large gang.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from figures import Figure, Goal, reported
from launch import machine
from running import Cluster, Program, children_of, nothing_left, read

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


def measure_packing(programs: dict[str, Program], sizes: list[int], seconds: float, rounds: int) -> Iterator[str]:
    """The rows of the table that compares makespans."""
    best = best_makespan(sizes, seconds)
    times: dict[str, list[float]] = {name: [] for name in programs}
    for number in range(1, rounds + 1):
        for name, program in programs.items():
            times[name].append(run(program, grid_of(sizes, seconds))[0])
            print(f"round {number}: {name} {times[name][-1]:.1f} s", file=sys.stderr)
    count = ", ".join(f"{sizes.count(size)} of {size}" for size in SIZES)
    grid = f"{len(sizes)} models ({count} workers) of {seconds:g} s"
    yield f"{grid}; the best packing takes {best:g} s"
    for name, taken in times.items():
        yield (
            f"| {name} | {statistics.median(taken):.1f} s | {min(taken):.1f}-{max(taken):.1f} s "
            f"| {statistics.median(taken) / best:.3f} x the best |"
        )
    yield from reported([packing(grid, best, *times.values())])


def packing(grid: str, best: float, ours: list[float], rays: Sequence[float] = ()) -> Figure:
    """How much longer than the best packing it takes."""
    here, theirs = ([taken / best for taken in each] for each in (ours, rays))
    goals, what = [Goal(bound=1.03, of="here", at_most=True)], f"{grid}: makespan beside the best packing"
    if not theirs:
        return Figure(what=what, here=here, unit="×", goals=goals)
    return Figure.beside("Ray Tune", theirs, share=True, what=what, here=here, unit="×", goals=goals)


def processor_times(program: Program, cluster: Cluster) -> dict[str, float]:
    """Seconds that processes of each kind have used so far; of ranks those that have ended."""
    workers = [cluster.worker_pid(nanny) for nanny in cluster.nannies]
    servers = children_of_workers(cluster)
    return {
        "driver": seconds_of(program.pid)[0],
        "Dask's scheduler": seconds_of(cluster.scheduler)[0],
        "workers with their agents": sum(seconds_of(worker)[0] for worker in workers),
        "fork servers": sum(seconds_of(server)[0] for server in servers),
        "ranks": sum(seconds_of(server)[1] for server in servers),
    }


def children_of_workers(cluster: Cluster) -> list[int]:
    """The fork servers, and what else Dask's workers have started."""
    return [child for nanny in cluster.nannies for child in children_of(cluster.worker_pid(nanny))]


def page_faults_of_ranks(cluster: Cluster) -> int:
    """Of all that have ended: each is a page that the rank was the first to touch, most of them to copy it."""
    return sum(int(stat_of(server)[8]) for server in children_of_workers(cluster))


def stat_of(pid: int) -> list[str]:
    """What the kernel counts of a process, from its state on; see proc_pid_stat(5)."""
    return read(f"/proc/{pid}/stat").rpartition(")")[2].split()


def seconds_of(pid: int) -> tuple[float, float]:
    """The processor time of a process, and that of its children which have ended."""
    own, own_in_kernel, of_ended, of_ended_in_kernel = map(int, stat_of(pid)[11:15])
    hertz = os.sysconf("SC_CLK_TCK")
    return (own + own_in_kernel) / hertz, (of_ended + of_ended_in_kernel) / hertz


def measure_cost(program: Program, cluster: Cluster, count: int, rounds: int) -> Iterator[str]:
    """What a model costs besides its training."""
    before, used_before = run(program, grid_of([1] * 8, 0.0))[1], processor_times(program, cluster)
    faults_before = page_faults_of_ranks(cluster)
    taken = [run(program, grid_of([1] * count, 0.0)) for _ in range(rounds)]
    costs, grown = [1000 * seconds / count for seconds, _ in taken], (taken[-1][1] - before) / 2**20
    yield f"{count} models that do nothing, {rounds} times: the driver's memory grew by {grown:.1f} MiB"
    used = processor_times(program, cluster)
    shares = {name: 1000 * (seconds - used_before[name]) / count / rounds for name, seconds in used.items()}
    parts = ", ".join(f"{name} {milliseconds:.1f} ms" for name, milliseconds in shares.items())
    yield f"processor time of a model that does nothing: {parts}; altogether {sum(shares.values()):.1f} ms"
    yield f"page faults of its rank: {(page_faults_of_ranks(cluster) - faults_before) / count / rounds:,.0f}"
    goals = [Goal(bound=10, of="here", at_most=True)]
    yield from reported([Figure(what=f"a model that does nothing, one of {count}", here=costs, unit="ms", goals=goals)])


def main() -> None:
    """Measure, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count (default: 3)")
    parser.add_argument("--work", type=float, default=3.0, help="seconds of fake work per experiment (default: 3)")
    parser.add_argument("--trivial", type=int, default=1000, help="experiments that do nothing (default: 1000)")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the mixes of sizes (default: 0 1 2)"
    )
    parser.add_argument("--skip", nargs="*", default=[], choices=["ray"], help="peers to leave out")
    parser.add_argument("--quick", action="store_true", help="one round, little work")
    asked = parser.parse_args()
    if asked.quick:
        asked.rounds, asked.work, asked.trivial, asked.seeds = 1, 1.0, 50, [0]
    mixes = [random.Random(seed).choices(SIZES, k=NUM_EXPERIMENTS) for seed in asked.seeds]
    with nothing_left("many") as folder:
        cluster = Cluster(folder / "cluster", NUM_WORKERS)
        programs = chosen(folder, cluster.contact, asked.skip)
        for name, program in programs.items():
            program.hear("ready")
            run(program, grid_of([1] * 8, 0.0))
            print(f"{name} is warm", file=sys.stderr)
        rows = [row for sizes in mixes for row in measure_packing(programs, sizes, asked.work, asked.rounds)]
        rows += measure_cost(programs["dispatch.map"], cluster, asked.trivial, asked.rounds)
        cluster.close()
    print("\n".join([machine(), *rows]))


if __name__ == "__main__":
    main()
