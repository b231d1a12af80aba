"""A user's script: a gang on a Dask cluster of its own, whose workers are `threads` or `processes`, or a `task`'s.

    driving.py HOW FOLDER

Each rank leaves a file in the folder while it trains, which it does until it is stopped.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from distributed import Client, LocalCluster

from flytekitplugins.daskpytorch import current_rank, dispatch


def train(folder: str) -> None:
    """As many all-reduces as there is time for."""
    while True:
        dist.all_reduce(torch.ones(1))
        Path(folder, f"trains-{current_rank().rank}").touch()


def main(how: str, folder: str) -> None:
    """Train."""
    if how == "task":
        spawned(folder=folder)  # type: ignore[name-defined]
        return
    options = {"processes": how == "processes", "threads_per_worker": 1, "dashboard_address": None}
    with LocalCluster(n_workers=2, **options) as cluster, Client(cluster) as client:
        dispatch.run(client, train, folder).result()


if sys.argv[1:2] == ["task"]:  # flytekit handles Ctrl-C in its own way
    from flytekit import task

    from flytekitplugins.daskpytorch import SpawnDDP

    @task(task_config=SpawnDDP(nproc=2))
    def spawned(folder: str) -> None:
        """The same on this machine."""
        train(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
