"""A user's script: a gang on a Dask cluster of its own, whose workers are `threads` or `processes`, or a `task`'s.

    driving.py HOW FOLDER UNTIL

The ranks' sum is left in the folder. They train "once", or "stopped" by the driver, which is "preempted" by a signal.
"""

import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from distributed import Client, LocalCluster

from flytekitplugins.daskpytorch import Gang, current_rank, dispatch
from flytekitplugins.daskpytorch.protocol import host


def train(folder: str, *, stops: bool) -> float:
    """One all-reduce, or as many as there is time for."""
    print("by print")
    rank, step = current_rank(), 0
    while True:
        step += 1
        total = torch.ones(1)
        dist.all_reduce(total)
        Path(folder, f"trains-{rank.rank}").touch()
        if not stops:
            return total.item()
        if rank.should_stop():
            rank.checkpoint.save(step, step)
            Path(folder, f"stopped-{rank.rank}").write_text(str(step))
            return 0.0


def main(how: str, folder: str, until: str) -> None:
    """Train, and say what came of it."""
    stops = until != "once"
    if until == "preempted":
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, lambda *_: host.preempt_all("the script was told to end"))
    if how == "task":
        results = [spawned(folder=folder, stops=stops)]  # type: ignore[name-defined]
    else:
        options = {"processes": how == "processes", "threads_per_worker": 1, "dashboard_address": None}
        num_workers = 2 if stops else 1
        gang = Gang(ranks_per_worker=2 // num_workers)
        with LocalCluster(n_workers=num_workers, **options) as cluster, Client(cluster) as client:
            results = dispatch.run(client, train, folder, stops=stops, gang=gang).result()
    Path(folder, "results").write_text(f"{results}")


if sys.argv[1:2] == ["task"]:  # flytekit handles Ctrl-C in its own way
    from flytekit import task

    from flytekitplugins.daskpytorch import SpawnDDP

    @task(task_config=SpawnDDP(nproc=2))
    def spawned(folder: str, stops: bool) -> float:
        """The same on this machine."""
        return train(folder, stops=stops)


if __name__ == "__main__":
    main(*sys.argv[1:])
