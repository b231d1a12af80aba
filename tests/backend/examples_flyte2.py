"""Tasks of Flyte 2 of shapes that its workflow does not have."""

import flyte

from flyteplugins.daskpytorch import DaskCluster, DaskDDP, Gang, Scheduler, SpawnDDP, WorkerGroup, current_rank

IMAGE = "registry.example/daskpytorch:v1"
SMALL = flyte.Resources(cpu=1, memory="2Gi")

on_gpus = flyte.TaskEnvironment(
    "on_gpus",
    image=IMAGE,
    resources=flyte.Resources(cpu=2, memory="8Gi"),
    plugin_config=DaskDDP(
        workers=WorkerGroup(number_of_workers=2, resources=flyte.Resources(cpu=16, memory="64Gi", gpu="A100:4")),
        scheduler=Scheduler(resources=SMALL),
    ),
)
all_on_gpus = flyte.TaskEnvironment(
    "all_on_gpus",
    image=IMAGE,
    resources=flyte.Resources(cpu=16, memory="64Gi", gpu="A100:4", shm="auto"),
    plugin_config=DaskDDP(workers=WorkerGroup(number_of_workers=2), scheduler=Scheduler(resources=SMALL)),
)
on_one_node = flyte.TaskEnvironment(
    "on_one_node",
    image=IMAGE,
    resources=flyte.Resources(cpu=16, memory="64Gi", gpu="A100:4", shm="auto"),
    plugin_config=SpawnDDP(),
)
with_client = flyte.TaskEnvironment(
    "with_client",
    image=IMAGE,
    resources=SMALL,
    env_vars={"DASK_DISTRIBUTED__WORKER__DAEMON": "True", "OMP_NUM_THREADS": "1"},
    plugin_config=DaskCluster(workers=WorkerGroup(number_of_workers=3, resources=SMALL)),
)
tried_again = flyte.TaskEnvironment(
    "tried_again",
    image=IMAGE,
    resources=SMALL,
    interruptible=True,
    plugin_config=DaskDDP(
        workers=WorkerGroup(number_of_workers=2, resources=SMALL), gang=Gang(start_timeout=60, max_restarts=1)
    ),
)


@on_gpus.task
def gpus_of_workers() -> int:
    return current_rank().world_size


@all_on_gpus.task
def gpus_of_all() -> int:
    return current_rank().world_size


@on_one_node.task(retries=2)
def gpus_of_the_node() -> int:
    return current_rank().world_size


@with_client.task
def own_environment() -> None:
    """What the environment says of Dask wins."""


@tried_again.task(retries=2, report=True)
def train() -> int:
    return current_rank().world_size
