"""Measure a training's throughput as a gang and under `torchrun`, and the cost of supervision and checkpoints.

    python benchmarks/training.py                         # two starts of ten rounds, ten minutes on two cores
    python benchmarks/training.py --ranks 1 4 16          # numbers of ranks (default: 1, 2, 4, ... up to GPUs or cores)
    python benchmarks/training.py --quick                 # one start of two rounds, as a trial

Ranks train the model of `tasks.char_lstm` on the embedded names with DistributedDataParallel. A block has 46 steps with
128 windows for each rank. With GPUs, each rank has a GPU and nccl, and a block has 460 steps. All contestants run at
the same time, but only one trains at a time. In each round, each contestant trains one block, in a new random order.

torchrun  a plain script
gang      `dispatch.run` with `log` and `should_stop` at every step, and a checkpoint in the middle of each block
quiet     the same gang, in a block whose function does not call this package (only for the largest number of ranks)

The wall times of a shared machine vary by more than the cost of supervision. The comparison of `gang` and `quiet`
therefore uses the processor time beside the training itself. The calls in all ranks, this package's threads, the
driver, the Dask workers with the agents, Dask's scheduler and the nannies count. The row has the median between its
bounds of 95 %.

Results vary more between starts of the processes than between rounds, so all contestants start several times.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from figures import Figure, at_least, at_most, gpus, report
from running import Cluster, Program, asked, nothing_left, read, take_turns, torchrun, until, worker_below

BACKEND = "nccl" if gpus() else "gloo"
BATCH = 128
EPOCH = 46
BLOCK = 10 * EPOCH if gpus() else EPOCH
"""Number of steps in a block."""
NUM_RESAMPLED = 2000
"""Number of resamplings of the rounds for the bounds of a median."""

TRAIN = f"""
import contextlib
import itertools
import json
import os
import sys
import threading
import time
import torch
from torch import distributed
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from tasks.char_lstm import BLANK, CharLSTM, windows
from tasks.names import load_names

def seconds_of_our_threads():
    seconds = 0.0
    for thread in threading.enumerate():
        if thread.name.startswith("daskpytorch"):
            with contextlib.suppress(OSError), open(f"/proc/self/task/{{thread.native_id}}/schedstat") as file:
                seconds += int(file.read().split()[0]) / 1e9
    return seconds

def wait_for_all(device):
    distributed.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()

def train(folder, device, tools):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = CharLSTM().to(device)
    gang_model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters())
    every = windows(load_names().names).long()
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(distributed.get_rank()))
    batches = every[order].to(device).split({BATCH})[:{EPOCH}] * {BLOCK // EPOCH}
    step = 0

    def call(loss, number):
        used = time.thread_time()
        tools.log({{"loss": loss.detach(), "epoch": 1}}, step)
        if number == {BLOCK // 2}:
            tools.checkpoint.save({{"model": model.state_dict(), "optimizer": optimizer.state_dict()}}, step)
        tools.should_stop()
        return time.thread_time() - used

    def take_turn(calls):
        nonlocal step
        wait_for_all(device)
        ours, used, began = -seconds_of_our_threads(), -time.process_time(), time.perf_counter()
        for number, batch in enumerate(batches):
            logits = gang_model(batch[:, :-1])
            loss = functional.cross_entropy(logits.transpose(1, 2), batch[:, 1:], ignore_index=BLANK)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            ours += call(loss, number) if calls else 0.0
        wait_for_all(device)
        seconds = time.perf_counter() - began
        ours, used = ours + seconds_of_our_threads(), used + time.process_time()
        together = torch.tensor([ours, used], dtype=torch.float64, device=device)
        distributed.all_reduce(together)
        return [seconds, *together.tolist()]

    rank = distributed.get_rank()
    reports = open(f"{{folder}}/reports-{{rank}}", "a", buffering=1)
    for number in itertools.count():
        while not os.path.exists(order := f"{{folder}}/order-{{number}}"):
            time.sleep(0.01)
        reports.write(json.dumps(take_turn(json.load(open(order)))) + "\\n")
"""

TORCHRUN = f"""{TRAIN}
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if "{BACKEND}" == "nccl" else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
distributed.init_process_group("{BACKEND}")
train(sys.argv[1], device, None)
"""

DASK = f"""{TRAIN}
from distributed import Client
from flytekitplugins.daskpytorch import Gang, current_rank, dispatch

def rank(folder):
    train(folder, current_rank().device, current_rank())

with Client(scheduler_file=sys.argv[2]) as client:
    gang = Gang(backend="{BACKEND}", ranks_per_worker=int(sys.argv[3]), max_restarts=0)
    dispatch.run(client, rank, sys.argv[1], gang=gang).result()
"""


class Ranks:
    """Ranks that train a block at each order, and wait in between. An order is a file in their folder."""

    def __init__(self, folder: Path, text: str, *arguments: str, under: Sequence[str] = (sys.executable,)) -> None:
        """Start this Python text as a program, whose first argument is the folder."""
        self._folder, self._num_turns = folder, 0
        self.program = Program.of(text, folder, str(folder), *arguments, under=under)

    def take_turn(self, order: object) -> Any:
        """Order each rank to train a block, and return the report of rank 0."""
        (unfinished := self._folder / "order").write_text(json.dumps(order))
        unfinished.rename(self._folder / f"order-{self._num_turns}")
        self._num_turns += 1
        until(lambda: len(self._reports()) == self._num_turns or self._has_ended(), "a turn")
        return json.loads(self._reports()[-1])

    def _reports(self) -> list[str]:
        lines = read(self._folder / "reports-0").splitlines(keepends=True)
        return [line for line in lines if line.endswith("\n")]

    def _has_ended(self) -> bool:
        if self.program.has_spoken():
            raise self.program.failure("ended")
        return False


@dataclass(frozen=True)
class Block:
    """Measurement of one block of all ranks."""

    seconds: float
    aside: float
    """Processor seconds beside the training itself: calls, threads and other processes."""
    busy: float
    """Processor seconds of all processes that take part."""

    def __str__(self) -> str:
        return f"{1000 * self.seconds / BLOCK:.2f} ms per step"


def cpu_seconds(pids: list[int]) -> float:
    """Return the processor time of processes, to the nanosecond (see clock_getcpuclockid(3))."""
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


def turn(ranks: Ranks, beside: list[int], *, calls: bool) -> Block:
    """Train a block, and measure the processor time of ranks and of the other processes."""
    before = cpu_seconds(beside)
    seconds, ours, used = ranks.take_turn(calls)
    others = cpu_seconds(beside) - before
    return Block(seconds, ours + others, used + others)


def contestants(numbers: list[int], folder: Path, cluster: Cluster) -> dict[str, Callable[[], Block]]:
    """Start all ranks, and return the turns by name."""
    ways: dict[str, Callable[[], Block]] = {}
    for number in numbers:
        plain = Ranks(folder / f"torchrun-{number}", TORCHRUN, under=torchrun(number))
        gang = Ranks(folder / f"gang-{number}", DASK, cluster.contact, str(number))
        beside = [gang.program.pid, cluster.scheduler, *cluster.nannies, *map(worker_below, cluster.nannies)]
        ways[f"torchrun {number}"] = partial(turn, plain, [], calls=False)
        ways[f"gang {number}"] = partial(turn, gang, beside, calls=True)
        ways[f"quiet {number}"] = partial(turn, gang, beside, calls=False)
    return {name: way for name, way in ways.items() if not name.startswith("quiet") or name == f"quiet {numbers[-1]}"}


def bounds(values: list[float]) -> list[float]:
    """Return the median between its bounds of 95 %, by resampling."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(NUM_RESAMPLED))
    return [medians[NUM_RESAMPLED // 40], statistics.median(values), medians[-NUM_RESAMPLED // 40]]


def figures(numbers: list[int], found: dict[str, list[Block]]) -> Iterator[Figure]:
    """Yield the rows: throughput for each number of ranks, and the cost of supervision."""
    for number in numbers:
        here, theirs = (
            [number * BATCH * BLOCK / block.seconds for block in found[f"{side} {number}"]]
            for side in ("gang", "torchrun")
        )
        what = f"training by DDP ({BACKEND}) with metrics and checkpoints, ranks: {number}"
        row = {"what": what, "here": here, "unit": "samples/s", "goals": at_least(0.97)}
        yield Figure.beside("`torchrun`", theirs, **row)
    pairs = zip(found[f"gang {numbers[-1]}"], found[f"quiet {numbers[-1]}"], strict=True)
    shares = [100 * (gang.aside - quiet.aside) / quiet.busy for gang, quiet in pairs]
    what = "a metric and `should_stop` at every step, a checkpoint a block: of all processor time (95 %)"
    yield Figure(what=what, here=bounds(shares), unit="%", goals=at_most(2, "here"))


def main() -> None:
    """Measure, and print the table."""
    places = len(gpus()) or len(os.sched_getaffinity(0))
    numbers = [1 << exponent for exponent in range(places.bit_length())]
    options = {"starts": (2, 1, "how often all are started"), "rounds": (10, 2, "rounds in each start")}
    arguments = asked(__doc__, ranks=(numbers, numbers, "numbers of ranks"), **options)
    rng = random.Random(0)
    found: dict[str, list[Block]] = {}
    with nothing_left("training") as folder:
        for start in range(arguments.starts):
            cluster = Cluster(folder / f"cluster-{start}", 1)
            ways = contestants(arguments.ranks, folder / f"start-{start}", cluster)
            for name, blocks in take_turns(ways, arguments.rounds, rng=rng).items():
                found.setdefault(name, []).extend(blocks)
            for way in ways.values():
                way.args[0].program.kill()  # type: ignore[attr-defined]
            cluster.close()
    report(figures(arguments.ranks, found), arguments.on)


if __name__ == "__main__":
    main()
