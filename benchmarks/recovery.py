"""Measure the seconds from a failure until the ranks train again, and check that reports name the rank and cause.

    pip install '.[bench]'                                # Ray, Monarch and torchrunx, for their rows
    python benchmarks/recovery.py                         # five rounds, half an hour
    python benchmarks/recovery.py --quick                 # one round, as a trial
    python benchmarks/recovery.py --only rank torchrun    # some contestants

Two ranks with gloo train for eight seconds before the fault, on the CPU, or on one or two GPUs if there are any. The
measured time ends when the slower rank has completed its first optimizer step in a new process, from a checkpoint.

rank       a rank is killed (SIGKILL): `dispatch.run` on a running Dask cluster
torchrun   the same under `torchrun --max-restarts`, with a checkpoint file that rank 0 writes, and with
           TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, as restarts of gloo ranks often fail without that variable
Ray Train  the same with `FailureConfig(max_failures=3)` and a checkpoint file of rank 0
Monarch    the same: the caller receives the failure, stops all processes and spawns new ones
torchrunx  the same: the caller receives the failure and launches again
lost       a worker is killed with its nanny, as in the loss of a pod, and the other worker suffices (`min_workers=1`)
first      no fault: the first gang on a new cluster, from `dispatch.run` to its first step
returned   a worker is killed alone, and all are needed: time since the registration of its nanny's next worker, whose
           fork server imports torch again, beside `first`
blame      number of reports with the right rank and cause, for faults in either rank whose consequences hide the cause:
           `dispatch.run`, and `torchrun` (its report, with `@record`)
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from figures import Figure, at_least, at_most, gpus, report
from running import (
    SERVE,
    Cluster,
    Program,
    asked,
    kill,
    nothing_left,
    take_turns,
    torchrun,
    until,
    worker_below,
)

NUM_RANKS = 2
WARM_UP = 8.0
"""Seconds of training before a fault, in which launchers finish their work in the background."""
PRELOAD_TIME = 10.0
"""Seconds in which a new worker imports what ranks need, before its first gang."""
TIME_LIMIT = 180.0
"""Timeout in seconds for a gang to start, or to train again."""
HANG_TIMEOUT = 6.0
"""Seconds after which the watchdog, or the process group's timeout, reports a hang."""

# ---- Programs -------------------------------------------------------------------------------------------------------

TRAIN = """
import os
import sys
import time
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

SAVE_INTERVAL = 10
PACE = 0.01

def load_from(folder):
    path = os.path.join(folder, "checkpoint.pt")
    return torch.load(path, weights_only=True) if os.path.exists(path) else None

def save_to(folder, state):
    if distributed.get_rank() == 0:
        path = os.path.join(folder, "checkpoint.pt")
        torch.save(state, f"{path}.new")
        os.replace(f"{path}.new", path)

def train(folder, load=load_from, save=save_to):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, device = distributed.get_rank(), "cpu"
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).to(device)
    gang_model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters())
    step = 0
    if (state := load(folder)) is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    with open(os.path.join(folder, f"steps-{rank}"), "a", buffering=1) as notes:
        while True:
            step += 1
            inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(1000 * step + rank)).to(device)
            optimizer.zero_grad()
            nn.functional.mse_loss(gang_model(inputs), inputs).backward()
            optimizer.step()
            notes.write(f"{os.getpid()} {step} {time.time()!r}\\n")
            if step % SAVE_INTERVAL == 0:
                save(folder, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step})
            time.sleep(PACE)
"""

TORCHRUN = f"""{TRAIN}
distributed.init_process_group("gloo")
train(sys.argv[1])
"""

DASK = f"""{TRAIN}
from distributed import Client
from flytekitplugins.daskpytorch import Gang, current_rank, dispatch

def rank(folder):
    checkpoint = current_rank().checkpoint
    train(folder, lambda _: checkpoint.load(), lambda _, state: checkpoint.save(state, state["step"]))

with Client(scheduler_file=sys.argv[2]) as client:
    with open(os.path.join(sys.argv[1], "began"), "w") as file:
        file.write(repr(time.time()))
    dispatch.run(client, rank, sys.argv[1], gang=Gang(backend="gloo", min_workers=int(sys.argv[3]))).result()
"""

RAY = f"""{TRAIN}
import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

temporary = os.environ["TMPDIR"]
ray.init("local", num_cpus={NUM_RANKS + 1}, include_dashboard=False, _temp_dir=os.path.join(temporary, "ray"))
failures = FailureConfig(max_failures=3)
TorchTrainer(
    lambda config: train(config["folder"]),
    train_loop_config={{"folder": sys.argv[1]}},
    torch_config=TorchConfig(backend="gloo"),
    scaling_config=ScalingConfig(num_workers={NUM_RANKS}, use_gpu=False),
    run_config=RunConfig(storage_path=os.path.join(temporary, "results"), failure_config=failures),
).fit()
"""

MONARCH = f"""{TRAIN}
import tempfile
import monarch.actor
from monarch.actor import Actor, current_rank, endpoint, this_host

monarch.actor.unhandled_fault_hook = lambda failure: None  # else it interrupts the caller, who has heard by then

class Rank(Actor):
    @endpoint
    def train(self, folder, store):
        store = f"file://{{store}}/store"
        distributed.init_process_group("gloo", init_method=store, rank=current_rank().rank, world_size={NUM_RANKS})
        train(folder)

if __name__ == "__main__":
    for _ in range(4):
        processes = this_host().spawn_procs({{"ranks": {NUM_RANKS}}})
        try:
            processes.spawn("ranks", Rank).train.call(sys.argv[1], tempfile.mkdtemp()).get()
        except Exception as error:
            print(error, file=sys.stderr)
            processes.stop().get()
"""

TORCHRUNX = f"""{TRAIN}
import torchrunx

if __name__ == "__main__":
    for _ in range(4):
        try:
            torchrunx.Launcher(hostnames=["localhost"], workers_per_host={NUM_RANKS}, backend="gloo").run(
                train, sys.argv[1]
            )
        except Exception as error:
            print(error, file=sys.stderr)
"""

FAULTS = """
import ctypes
import os
import resource
import sys
import time
from datetime import timedelta
import torch
from torch import distributed

class SpoiltError(Exception):
    pass

def fail(fault):
    match fault:
        case "raise":
            raise SpoiltError("the batch is spoilt")
        case "close":
            distributed.destroy_process_group()
            time.sleep(0.2)  # the others' connection errors come first
            raise SpoiltError("the batch is spoilt")
        case "segfault":
            ctypes.string_at(0)
        case "exit":
            os._exit(3)
        case "memory":
            with open("/proc/self/statm") as file:
                used = int(file.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
            bytearray(1 << 30)
        case "hang":
            time.sleep(600)

def train(fault, guilty):
    for step in range(20):
        if step == 10 and distributed.get_rank() == int(guilty):
            fail(fault)
        distributed.all_reduce(torch.ones(1000))
"""

BLAME_TORCHRUN = f"""{FAULTS}
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main(fault, guilty):
    limit = {{"timeout": timedelta(seconds={HANG_TIMEOUT})}} if fault == "hang" else {{}}
    distributed.init_process_group("gloo", **limit)
    train(fault, guilty)

main(*sys.argv[1:])
"""

BLAME_DASK = f"""{FAULTS}{SERVE}
from distributed import Client
from flytekitplugins.daskpytorch import Gang, GangError, dispatch

def blame(fault, guilty):
    settings = Gang(max_restarts=0, hang_timeout={HANG_TIMEOUT})
    error = dispatch.run(client, train, fault, guilty, gang=settings).exception()
    report = error if isinstance(error, GangError) else error.__cause__
    return report.rank, report.cause

with Client(scheduler_file=sys.argv[1]) as client:
    serve(blame)
"""

# ---- Time to train again --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """Training of two ranks, and their notes in a folder."""

    program: Program
    folder: Path

    def steps(self, rank: int) -> list[tuple[int, int, float]]:
        """Return the process id, the step and the time of each step of a rank, in all attempts."""
        path = self.folder / f"steps-{rank}"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [
            (int(pid), int(step), float(at))
            for pid, step, at in (line.split() for line in lines if line.endswith("\n"))
        ]

    def wait_until_warm(self) -> list[int]:
        """Wait until all ranks have trained for `WARM_UP` seconds, and return their process ids."""

        def is_warm() -> bool:
            everyone = [self.steps(rank) for rank in range(NUM_RANKS)]
            return all(steps and steps[-1][2] - steps[0][2] >= WARM_UP for steps in everyone)

        self._wait(is_warm, "train")
        return [self.steps(rank)[-1][0] for rank in range(NUM_RANKS)]

    def wait_until_resumed(self, old_pids: list[int], num_ranks: int) -> float:
        """Wait until all ranks have completed a step in a new process, and return the time of the slowest."""
        first: dict[int, tuple[int, int, float]] = {}

        def has_resumed() -> bool:
            for rank in range(num_ranks):
                new = [step for step in self.steps(rank) if step[0] not in old_pids]
                first.update({rank: new[0]} if new else {})
            return len(first) == num_ranks

        self._wait(has_resumed, "train again")
        if any(number == 1 for _, number, _ in first.values()):
            raise self.program.failure("started again from the beginning instead of from a checkpoint")
        return max(at for _, _, at in first.values())

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        def has_come() -> bool:
            if self.program.has_ended():
                raise self.program.failure(f"ended before its ranks could {what}")
            return condition()

        until(has_come, f"the ranks to {what}", TIME_LIMIT)

    def end(self) -> None:
        """Kill the program and the ranks."""
        self.program.kill()
        for rank in range(NUM_RANKS):
            for pid in {pid for pid, _, _ in self.steps(rank)}:
                kill(pid)


PEERS = {"torchrun": TORCHRUN, "Ray Train": RAY, "Monarch": MONARCH, "torchrunx": TORCHRUNX}


class Bench:
    """Dask cluster, with trainings that run one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cluster = Cluster(folder / "cluster", NUM_RANKS, "--preload", "flytekitplugins.daskpytorch.preload")
        self._num_started = 0

    def started(self, way: str, min_workers: int, cluster: Cluster | None = None) -> Training:
        """Start a training in its own folder, by default on the cluster of all trainings."""
        self._num_started += 1
        folder = self.folder / str(self._num_started)
        (folder / "t").mkdir(parents=True)
        told = str(folder), (cluster or self.cluster).contact, str(min_workers)
        under = torchrun(NUM_RANKS, restarts=3) if way == "torchrun" else [sys.executable]
        # torch 2.15 shares one store among all attempts, so gloo finds the addresses of dead ranks there. Without this
        # variable, a restart fails again or waits for minutes.
        environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TMPDIR": str(folder / "t")}
        return Training(Program.of(PEERS.get(way, DASK), folder, *told, under=under, environment=environment), folder)

    def measure(self, way: str) -> float:
        """Return the seconds from the kill to the next step of all ranks that go on.

        A killed worker's seconds begin with the registration of its successor.
        """
        num_ranks = NUM_RANKS - (way == "lost")
        training = self.started(way, num_ranks)
        pids, victim = training.wait_until_warm(), self._num_started % NUM_RANKS
        nanny, began = self.cluster.nannies[victim], time.time()
        if way == "lost":
            self.cluster.lose(nanny)
        else:
            kill(worker_below(nanny) if way == "returned" else pids[victim])
        ended = training.wait_until_resumed(pids, num_ranks)
        if way == "returned":
            began = max(self.cluster.workers().values())
        training.end()
        if way == "lost":
            self.cluster.add_worker()
            time.sleep(PRELOAD_TIME)
        return ended - began

    def measure_first(self) -> float:
        """Return the seconds of a first gang on a new cluster, from `dispatch.run` to the first step of all ranks."""
        cluster = Cluster(self.folder / f"cluster-{self._num_started}", NUM_RANKS)
        training = self.started("first", NUM_RANKS, cluster)
        training.wait_until_warm()
        first_steps = [training.steps(rank)[0][2] for rank in range(NUM_RANKS)]
        training.end()
        cluster.close()
        return max(first_steps) - float((training.folder / "began").read_text())

    def ways(self, chosen: list[str]) -> dict[str, Callable[[], float]]:
        """Return the measurements by name."""
        ways: dict[str, Callable[[], float]] = {way: partial(self.measure, way) for way in chosen if way != "blame"}
        return ways | ({"first": self.measure_first} if "first" in chosen else {})


def figures(times: dict[str, list[float]]) -> Iterator[Figure]:
    """Yield the rows of the seconds."""
    what = f"rank killed{' on GPUs' if gpus() else ''}: `dispatch.run`, to all ranks' next step"
    peers = {peer: times[peer] for peer in PEERS if peer in times}
    if "rank" in times and "torchrun" in peers:
        goals = [*at_most(0.4, "here"), *at_least(10)]
        yield Figure.beside("`torchrun`", peers.pop("torchrun"), what=what, here=times["rank"], goals=goals)
    if "rank" in times and peers:
        yield Figure.beside_quickest(peers, what=f"{what}, beside other peers", here=times["rank"])
    if "lost" in times:
        what = "worker lost, the others go on: `dispatch.run`, to all ranks' next step"
        yield Figure(what=what, here=times["lost"], goals=at_most(0.6, "here"))
    if "returned" in times and "first" in times:
        what = "worker killed, after the new one was registered: `dispatch.run`, to all ranks' next step"
        first, found = times["first"], times["returned"]
        yield Figure.beside("a first gang's first step", first, share=True, what=what, here=found, goals=at_most(1))


# ---- Blame ----------------------------------------------------------------------------------------------------------

CASES = {
    "close": "SpoiltError",
    "raise": "SpoiltError",
    "segfault": "SIGSEGV",
    "exit": r"exit ?code\s*:?\s*3\b",
    "memory": "MemoryError",
    "hang": r"hangs|(?i:timed? ?out)",
}
"""Pattern of the right cause in a report, by fault."""
Blamed = tuple[int | None, str]
"""Rank that a launcher blames, and its report."""


def blame_by_torchrun(folder: Path, fault: str, guilty: int) -> Blamed:
    """Return the rank and text of `torchrun`'s report."""
    program = Program.of(BLAME_TORCHRUN, folder, fault, str(guilty), under=torchrun(NUM_RANKS))
    if not program.wait():
        raise program.failure("ended without a failure")
    said = program.log.read_text(errors="replace").rpartition("Root Cause (first observed failure):")[2]
    found = re.search(r"rank\s*: (\d+)", said)
    return (int(found[1]) if found else None), said


def judge(repeats: int, folder: Path, cluster: Cluster) -> Figure:
    """Return the row with the number of right reports of each launcher."""
    dask = Program.serving(BLAME_DASK, folder / "blame", cluster.contact)
    numbers = iter(range(sys.maxsize))
    launchers: dict[str, Callable[[str, int], Blamed]] = {
        "`dispatch.run`": dask.call,
        "`torchrun`": lambda *case: blame_by_torchrun(folder / f"blame-{next(numbers)}", *case),
    }
    right = dict.fromkeys(launchers, 0)
    for number in range(repeats):
        guilty = (number + 1) % NUM_RANKS
        for fault, cause in CASES.items():
            for name, blame in launchers.items():
                rank, text = blame(fault, guilty)
                is_right = rank == guilty and re.search(cause, text) is not None
                right[name] += is_right
                said = "right" if is_right else f"wrong: rank {rank}, {json.dumps(text[-200:])}"
                print(f"rank {guilty} {fault}: {name}: {said}", file=sys.stderr)
    most = repeats * len(CASES)
    what, peer = f"guilty rank and cause named, of {most}", f"`torchrun` {right['`torchrun`']}"
    return Figure(what=what, here=[right["`dispatch.run`"]], unit="", peer=peer, goals=at_least(most, "here"))


def main() -> None:
    """Measure, and print the table."""
    options = {"rounds": (5, 1, "rounds that count"), "repeats": (4, 1, "how often each case of blame")}
    arguments = asked(__doc__, ("rank", *PEERS, "lost", "first", "returned", "blame"), **options)
    found = []
    with nothing_left("recovery") as folder:
        bench = Bench(folder)
        found += figures(take_turns(bench.ways(arguments.ways), arguments.rounds))
        if "blame" in arguments.ways:
            found.append(judge(arguments.repeats, folder, bench.cluster))
    report(found, arguments.on)


if __name__ == "__main__":
    main()
