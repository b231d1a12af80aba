"""Tasks of shapes that neither the workflows nor the README's examples have."""

import json
import os
import time
from pathlib import Path

import torch.distributed as dist
from flytekit import PodTemplate, Resources, task
from flytekit.extras.accelerators import A100
from kubernetes.client import V1PodSpec

from flytekitplugins.daskpytorch import (
    DaskCluster,
    DaskDDP,
    Gang,
    Scheduler,
    SpawnDDP,
    Wandb,
    WorkerGroup,
    current_rank,
)

ON_GPUS = WorkerGroup(number_of_workers=2, limits=Resources(cpu="16", mem="64Gi", gpu="4"))


@task(
    task_config=DaskDDP(workers=ON_GPUS, wandb=Wandb(project="pets")),
    shared_memory="16Gi",
    accelerator=A100,
    pod_template=PodTemplate(pod_spec=V1PodSpec(containers=[])),  # without one, the accelerator is refused
)
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
    task_config=SpawnDDP(wandb=Wandb(project="pets", entity="team")),
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
    annotations={"karpenter.sh/do-not-disrupt": "false"},
)
def own_environment() -> None:
    """What the task says of Dask and its pods wins."""


SMALL = WorkerGroup(number_of_workers=2, limits=Resources(cpu="1", mem="2Gi"))


@task(
    task_config=DaskDDP(workers=SMALL, gang=Gang(start_timeout=300, max_restarts=1)),
    pod_template=PodTemplate(pod_spec=V1PodSpec(containers=[]), labels={"kueue.x-k8s.io/queue-name": "training"}),
    requests=Resources(cpu="1", mem="2Gi"),
    interruptible=True,
    retries=3,
)
def counting(folder: str, steps: int = 3, pace: float = 0.0) -> int:
    """Count the steps of all attempts, and leave who has done which in the folder."""
    rank = current_rank()
    first = (rank.checkpoint.load() or {"step": 0})["step"] + 1
    for step in range(first, steps + 1):
        time.sleep(pace)
        dist.barrier()
        done = {
            "step": step,
            "first": first,
            "pod": os.environ["HOSTNAME"],
            "attempt": os.environ["FLYTE_ATTEMPT_NUMBER"],
        }
        with Path(folder, f"rank-{rank.rank}").open("a") as trace:
            trace.write(f"{json.dumps(done)}\n")
        rank.checkpoint.save({"step": step}, step)
    return steps
