"""Measure the memory of a gang of four ranks with all of its helper processes, beside `torchrun`.

    python benchmarks/memory.py               # three rounds, about six minutes
    python benchmarks/memory.py --quick       # one round of two ranks, as a trial

Ranks on the CPU train a small model. After ten seconds, the benchmark adds up the memory of all processes of the
launch: ranks, driver, agents, fork servers, Dask's scheduler, workers and nannies. The memory is the proportional set
size (PSS), which divides a shared page equally among its processes.

torchrun   `torchrun --standalone`
spawn      a `SpawnDDP` task
first      the first `dispatch.run` on a new cluster, with a worker for each rank
warm       the second `dispatch.run` on that cluster
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from figures import Figure, at_most, report
from running import Cluster, Program, asked, nothing_left, read, started_here, take_turns, torchrun, until

SETTLE = 10.0
"""Seconds of training before the measurement."""

TRAIN = """
import os
import sys
import time
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

def train(folder):
    torch.set_num_threads(1)
    model = DistributedDataParallel(torch.nn.Linear(256, 256))
    optimizer = torch.optim.Adam(model.parameters())
    while True:
        optimizer.zero_grad()
        model(torch.randn(32, 256)).square().mean().backward()
        optimizer.step()
        ending = torch.tensor(float(os.path.exists(os.path.join(folder, "end"))))
        distributed.all_reduce(ending)
        open(os.path.join(folder, f"trains-{distributed.get_rank()}"), "w").close()
        if ending:
            break
        time.sleep(0.05)
"""

TORCHRUN = f"""{TRAIN}
distributed.init_process_group("gloo")
train(sys.argv[1])
distributed.destroy_process_group()
"""

SPAWN = f"""{TRAIN}
from flytekit import task
from flytekitplugins.daskpytorch import SpawnDDP

@task(task_config=SpawnDDP(nproc=int(sys.argv[2])))
def launch(folder: str) -> None:
    train(folder)

if __name__ == "__main__":
    launch(folder=sys.argv[1])
"""

DASK = f"""{TRAIN}
from distributed import Client
from flytekitplugins.daskpytorch import dispatch

with Client(scheduler_file=sys.argv[2]) as client:
    dispatch.run(client, train, sys.argv[1]).result()
"""

WAYS = ("torchrun", "spawn", "first", "warm")
BOUNDS = {"spawn": ("`SpawnDDP`", 0.85), "first": ("a first gang of Dask workers", 1.4), "warm": ("a warm one", 1.3)}


def memory_of(pids: set[int]) -> float:
    """Return the megabytes of these processes."""
    lines = [line for pid in pids for line in read(f"/proc/{pid}/smaps_rollup").splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024 / 1e6


class Bench:
    """Launches that are measured one after the other."""

    def __init__(self, folder: Path, num_ranks: int) -> None:
        self.folder, self.num_ranks = folder, num_ranks
        self._num_started = 0

    def measure(self, way: str) -> float:
        """Return the megabytes of a launch."""
        others = set(started_here())
        if way in ("torchrun", "spawn"):
            return self._trained(TORCHRUN if way == "torchrun" else SPAWN, str(self.num_ranks), others, way)
        cluster = Cluster(self.folder / f"cluster-{self._num_started}", self.num_ranks)
        found = self._trained(DASK, cluster.contact, others, way)
        if way == "warm":
            time.sleep(2 * SETTLE)  # fork servers import for training between two gangs
            found = self._trained(DASK, cluster.contact, others, way)
        cluster.close()
        return found

    def _trained(self, text: str, argument: str, others: set[int], way: str) -> float:
        """Run a training, and return its memory in megabytes."""
        self._num_started += 1
        folder = self.folder / str(self._num_started)
        under = torchrun(self.num_ranks) if way == "torchrun" else [sys.executable]
        program = Program.of(text, folder, str(folder), argument, under=under)
        until(lambda: program.has_ended() or len(list(folder.glob("trains-*"))) == self.num_ranks, "the ranks to train")
        time.sleep(SETTLE)
        found = memory_of(set(started_here()) - others)
        (folder / "end").touch()
        if program.wait():
            raise program.failure("failed")
        return found


def figures(found: dict[str, list[float]], num_ranks: int) -> Iterator[Figure]:
    """Yield the rows, all beside `torchrun`."""
    for way, (label, bound) in BOUNDS.items():
        if {way, "torchrun"} <= found.keys():
            what = f"memory (PSS) of {num_ranks} ranks with all helpers, {label}"
            row = {"what": what, "here": found[way], "unit": "MB", "goals": at_most(bound)}
            yield Figure.beside("`torchrun`", found["torchrun"], share=True, **row)


def main() -> None:
    """Measure, and print the table."""
    arguments = asked(__doc__, WAYS, rounds=(3, 1, "rounds that count"), ranks=(4, 2, "ranks"))
    with nothing_left("memory") as folder:
        bench = Bench(folder, arguments.ranks)
        ways = {way: partial(bench.measure, way) for way in arguments.ways}
        found = take_turns(ways, arguments.rounds, uncounted=0)
    report(figures(found, arguments.ranks), arguments.on)


if __name__ == "__main__":
    main()
