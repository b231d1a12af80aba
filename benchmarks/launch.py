"""Measure the time from a gang's launch to the end of its first all-reduce, beside its peers.

    pip install '.[bench]'                                # Ray, Monarch and torchrunx, for their rows
    python benchmarks/launch.py                           # five rounds, a quarter of an hour
    python benchmarks/launch.py --quick --only torchrun warm
    python benchmarks/launch.py --backend nccl            # one rank per GPU

Each launch ends when the slowest rank has completed an all-reduce, whose value is checked. The launch has two ranks
with gloo on the CPU, or one rank per GPU with nccl. `torchrun` imports torch in each launch, and its time starts with
the command.

warm         `dispatch.run` on a running Dask cluster with a worker for each rank, or one for all GPUs
first gang   the same on a new cluster
preloaded    the same, and the workers have preloaded the ranks' imports for 15 s
second task  a `SpawnDDP` task, in a process that has run one before
Ray Train    `fit()` on a running Ray (gloo only)
Monarch      two processes of `this_host()`, an actor in each that joins a process group (gloo only)
torchrunx    `Launcher.run`, from a running process (gloo only)

`commands.py` measures `pyflyte run`.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from figures import Figure, at_least, at_most, gpus, report
from running import SERVE, TIME_LIMIT, Cluster, Program, asked, nothing_left, take_turns, torchrun

SIZE, BACKEND = "LAUNCH_SIZE", "LAUNCH_BACKEND"
"""Environment variables with the number of ranks, and with the backend of their process group."""
UP_FOR = 15.0
"""Seconds between a worker's start and its first gang, if the worker preloads."""

MEET = f"""
import os
import sys
import time
import torch
from torch import distributed

NUM_RANKS, BACKEND = int(os.environ["{SIZE}"]), os.environ["{BACKEND}"]

def meet(folder):
    total = torch.ones(1, device="cuda" if BACKEND == "nccl" else "cpu")
    distributed.all_reduce(total)
    found, now = total.item(), time.time()
    if found != NUM_RANKS:
        raise ValueError(f"the all-reduce of {{NUM_RANKS}} ranks gave {{found}}")
    with open(os.path.join(folder, str(distributed.get_rank())), "w") as mark:
        mark.write(repr(now))
"""

TORCHRUN = f"""{MEET}
if BACKEND == "nccl":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
distributed.init_process_group(BACKEND)
meet(sys.argv[1])
distributed.destroy_process_group()
"""

DASK = f"""{MEET}{SERVE}
from distributed import Client
from flytekitplugins.daskpytorch import Gang, dispatch

gang = Gang(backend=BACKEND, ranks_per_worker=NUM_RANKS // int(sys.argv[2]))
with Client(scheduler_file=sys.argv[1]) as client:
    serve(lambda folder: dispatch.run(client, meet, folder, gang=gang).result(timeout={TIME_LIMIT}) and None)
"""

SPAWN_TASK = f"""{MEET}{SERVE}
from flytekit import task
from flytekitplugins.daskpytorch import Gang, SpawnDDP

@task(task_config=SpawnDDP(nproc=NUM_RANKS, gang=Gang(backend=BACKEND)))
def launch(folder: str) -> None:
    meet(folder)

if __name__ == "__main__":
    serve(lambda folder: launch(folder=folder))
"""

RAY = f"""{MEET}{SERVE}
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

def launch(folder):
    TorchTrainer(
        lambda config: meet(folder),
        train_loop_config={{}},
        torch_config=TorchConfig(backend=BACKEND),
        scaling_config=ScalingConfig(num_workers=NUM_RANKS, use_gpu=False),
        run_config=RunConfig(storage_path=os.path.join(os.environ["TMPDIR"], "results")),
    ).fit()

# One logical CPU more than the ranks need, for Ray's own actors.
folder = os.path.join(os.environ["TMPDIR"], "ray")
ray.init("local", num_cpus=NUM_RANKS + 1, include_dashboard=False, _temp_dir=folder)
serve(launch)
"""

TORCHRUNX = f"""{MEET}{SERVE}
import torchrunx

if __name__ == "__main__":
    launcher = torchrunx.Launcher(hostnames=["localhost"], workers_per_host=NUM_RANKS, backend=BACKEND)
    launcher.extra_env_vars = {{"{SIZE}": str(NUM_RANKS), "{BACKEND}": BACKEND}}
    serve(lambda folder: launcher.run(meet, folder) and None)
"""

MONARCH = f"""{MEET}{SERVE}
from monarch.actor import Actor, current_rank, endpoint, this_host

class Rank(Actor):
    @endpoint
    def meet(self, folder):
        store = f"file://{{folder}}/store"
        distributed.init_process_group(BACKEND, init_method=store, rank=current_rank().rank, world_size=NUM_RANKS)
        meet(folder)
        distributed.destroy_process_group()

def launch(folder):
    processes = this_host().spawn_procs({{"ranks": NUM_RANKS}})
    processes.spawn("ranks", Rank).meet.call(folder).get()
    processes.stop().get()

if __name__ == "__main__":
    serve(launch)
"""

WAYS = ("torchrun", "warm", "first gang", "preloaded", "second task", "Ray Train", "Monarch", "torchrunx")
PEERS = {"Ray Train": RAY, "Monarch": MONARCH, "torchrunx": TORCHRUNX}


class Bench:
    """Launchers of all contestants. Each launch has its own folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_ranks = int(os.environ[SIZE])
        self.num_workers = 1 if os.environ[BACKEND] == "nccl" else self.num_ranks
        self._num_launches = 0

    def ways(self, chosen: list[str]) -> dict[str, Callable[[], float]]:
        """Return the launches by name. Programs that serve several launches start now."""
        single = {
            "torchrun": self.torchrun,
            "first gang": self.first_gang,
            "preloaded": lambda: self.first_gang("--preload", "flytekitplugins.daskpytorch.preload", up_for=UP_FOR),
        }
        staying = {name: self.started(name) for name in chosen if name not in single}
        launches = single | {name: lambda it=program: self.asked(it) for name, program in staying.items()}
        return {name: launches[name] for name in chosen}

    def started(self, name: str) -> Program:
        """Return a running program that launches a gang at each request."""
        if name == "warm":
            return self.on_dask(Cluster(self.folder / "cluster", self.num_workers), self.folder / "warm")
        temporary = self.folder / name[:1]  # short, for the names of Ray's sockets
        temporary.mkdir()
        text = PEERS.get(name, SPAWN_TASK)
        return Program.serving(text, self.folder / name.replace(" ", "-"), environment={"TMPDIR": str(temporary)})

    def on_dask(self, cluster: Cluster, folder: Path) -> Program:
        """Return a driver on that cluster."""
        return Program.serving(DASK, folder, cluster.contact, str(self.num_workers))

    def asked(self, program: Program) -> float:
        """Return the seconds of a launch by a running program."""
        folder, began = self.next_folder(), time.time()
        program.call(str(folder))
        return self.met_at(folder) - began

    def torchrun(self) -> float:
        """Return the seconds of a launch by `torchrun`, including its own start."""
        folder = self.next_folder()
        began = time.time()
        program = Program.of(TORCHRUN, folder, str(folder), under=torchrun(self.num_ranks))
        if program.wait():
            raise program.failure("failed")
        return self.met_at(folder) - began

    def first_gang(self, *options: str, up_for: float = 0.0) -> float:
        """Return the seconds of the first gang on a new cluster, whose workers have run for `up_for` seconds."""
        folder = self.next_folder()
        cluster = Cluster(folder / "cluster", self.num_workers, *options)
        time.sleep(up_for)
        driver = self.on_dask(cluster, folder / "driver")
        seconds = self.asked(driver)
        driver.kill()
        cluster.close()
        shutil.rmtree(folder, ignore_errors=True)
        return seconds

    def next_folder(self) -> Path:
        """Return an empty folder."""
        self._num_launches += 1
        (folder := self.folder / f"launch-{self._num_launches}").mkdir()
        return folder

    def met_at(self, folder: Path) -> float:
        """Return the time at which the slowest rank had completed its all-reduce."""
        return max(float((folder / str(rank)).read_text()) for rank in range(self.num_ranks))


def figures(times: dict[str, list[float]]) -> Iterator[Figure]:
    """Yield the rows: all ways beside `torchrun`, and a warm gang beside the quickest of the other peers."""
    gang = f"{os.environ[SIZE]} ranks ({os.environ[BACKEND]}), launch to first all-reduce"
    bounds = {"warm": at_least(25), "first gang": at_least(1.33), "preloaded": at_most(0.6, "here")}
    bounds["second task"] = at_most(0.5, "here")
    labels = {"first gang": "first gang on a cluster", "preloaded": "first gang on workers that preload"}
    labels["second task"] = "a second `SpawnDDP` task in one process"
    for way, goals in bounds.items():
        if {way, "torchrun"} <= times.keys():
            what = f"{gang}, {labels.get(way, way)}"
            yield Figure.beside("`torchrun`", times["torchrun"], what=what, here=times[way], goals=goals)
    peers = {peer: times[peer] for peer in PEERS if peer in times}
    if peers and "warm" in times:
        yield Figure.beside_quickest(peers, what=f"{gang}, warm, beside other peers", here=times["warm"])


def main() -> None:
    """Measure, and print the table."""
    options = {"rounds": (5, 1, "rounds that count"), "backend": ("gloo", "gloo", "gloo or nccl")}
    arguments = asked(__doc__, WAYS, **options)
    is_nccl = arguments.backend == "nccl"
    if is_nccl and not gpus():
        sys.exit("--backend nccl: torch sees no GPU here; look at nvidia-smi and CUDA_VISIBLE_DEVICES")
    os.environ |= {BACKEND: arguments.backend, SIZE: str(len(gpus()) if is_nccl else 2)}
    chosen = [way for way in arguments.ways if not (is_nccl and way in PEERS)]
    with nothing_left("launch") as folder:
        times = take_turns(Bench(folder).ways(chosen), arguments.rounds)
    report(figures(times), arguments.on)


if __name__ == "__main__":
    main()
