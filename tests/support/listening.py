"""A program that runs a task of each type here, and prints the sockets at which any of its processes listens.

One JSON object a line: the task's name, and the addresses. Its argument is the host: `flytekit`, or `flyte`, Flyte 2's.
"""

import json
import os
import sys
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

if sys.argv[1] == "flyte":
    import flyte

    from flyteplugins import daskpytorch as ours

    def made(function, config):
        """The task, called by `flyte.run`."""
        environment = flyte.TaskEnvironment(function.__name__, plugin_config=config)
        task = environment.task(function)
        return lambda *given: flyte.with_runcontext(mode="local").run(task, *given).outputs()[0]
else:
    from flytekit import task

    from flytekitplugins import daskpytorch as ours

    def made(function, config):
        """The task, called as a function."""
        return lambda driver: task(task_config=config)(function)(driver=driver)


def sockets(driver: int, partitions: ours.data.DaskPartitions | None = None) -> str:
    """Where the driver and all its descendants listen, once the ranks are connected."""
    if partitions is not None:
        list(partitions.share())
    total = torch.ones(())
    dist.all_reduce(total)
    family = [psutil.Process(driver), *psutil.Process(driver).children(recursive=True)]
    dist.barrier()
    found = [each for process in family for each in process.net_connections("inet") if each.status == "LISTEN"]
    return " ".join(sorted({f"{each.laddr.ip}:{each.laddr.port}" for each in found}))


def dask_ddp(driver: int) -> str:
    """In a rank on a Dask worker."""
    return sockets(driver)


def spawn_ddp(driver: int) -> str:
    """In a rank beside another."""
    return sockets(driver)


def dask_cluster(driver: int) -> str:
    """In a gang that the task's function runs, and whose ranks use Dask, too."""
    client, gang = ours.current_client(), ours.Gang(ranks_per_worker=1)
    partitions = ours.data.DaskPartitions(client, client.scatter(["a", "b"]))
    return ours.dispatch.run(client, sockets, driver, partitions, gang=gang).result()[ours.current_rank().rank]


if __name__ == "__main__":
    if sys.argv[1] == "flyte":
        flyte.init(root_dir=Path(__file__).absolute().parent)
    configs = {spawn_ddp: ours.SpawnDDP(nproc=2), dask_ddp: ours.DaskDDP(), dask_cluster: ours.DaskCluster()}
    for function, config in configs.items():
        print(json.dumps({"task": function.__name__, "at": made(function, config)(os.getpid()).split()}), flush=True)
