"""Tasks of shapes that neither the workflows nor the README's examples have."""

from flytekit import Resources, task
from flytekit.extras.accelerators import A100

from flytekitplugins.daskpytorch import DaskCluster, DaskDDP, Scheduler, SpawnDDP, WorkerGroup, current_rank

ON_GPUS = WorkerGroup(number_of_workers=2, limits=Resources(cpu="16", mem="64Gi", gpu="4"))


@task(task_config=DaskDDP(workers=ON_GPUS), shared_memory="16Gi", accelerator=A100)
def gpus_of_workers() -> int:
    return current_rank().world_size


@task(
    task_config=DaskDDP(workers=ON_GPUS, scheduler=Scheduler(limits=Resources(cpu="1", mem="2Gi"))),
    accelerator=A100,
    requests=Resources(cpu="2", mem="8Gi", gpu="1"),
)
def gpus_of_all() -> int:
    return current_rank().world_size


@task(
    task_config=SpawnDDP(),
    accelerator=A100,
    shared_memory=True,
    requests=Resources(cpu="16", mem="64Gi", gpu="4"),
    interruptible=True,
    retries=2,
)
def on_one_node() -> int:
    return current_rank().world_size


@task(
    task_config=DaskCluster(workers=WorkerGroup(number_of_workers=3, limits=Resources(cpu="500m", mem="1500Mi"))),
    environment={"DASK_DISTRIBUTED__WORKER__DAEMON": "True", "OMP_NUM_THREADS": "1"},
)
def own_environment() -> None:
    """What the task says of Dask wins."""
