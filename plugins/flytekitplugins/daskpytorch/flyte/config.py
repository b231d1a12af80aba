"""Configs of flytekit's tasks. Loaded where tasks are defined, and imports no torch.

The import registers the task types with flytekit.
"""

import re
import sys
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter

from flytekit import Resources
from flytekitplugins.dask import Scheduler, WorkerGroup

from flytekitplugins.daskpytorch import checks
from flytekitplugins.daskpytorch.checks import Rule
from flytekitplugins.daskpytorch.flyte.context import HOST
from flytekitplugins.daskpytorch.flyte.task import DaskClusterTask, DaskDDPTask, SpawnDDPTask
from flytekitplugins.daskpytorch.task import config

SINGLE = "a flytekit.Resources without pairs of request and limit, which have fields of their own"
NUM_GPUS = re.compile(r"[0-9]{1,6}")


@dataclass(frozen=True, kw_only=True)
class _OnDask(config.OnDask):
    """Base of the configs of tasks that have a Dask cluster: its scheduler and its workers."""

    KINDS = {"scheduler": Scheduler, "workers": WorkerGroup}  # noqa: RUF012 - as its base has it

    scheduler: Scheduler = field(default_factory=Scheduler)
    """Image and resources of the Dask scheduler's pod."""
    workers: WorkerGroup = field(default_factory=lambda: WorkerGroup(number_of_workers=2))
    """Number, image and resources of the Dask workers' pods. Default: two workers."""

    def _rules_of_pods(self) -> dict[str, Rule]:
        rules = super()._rules_of_pods()
        for name in ("scheduler.requests", "scheduler.limits", "workers.requests", "workers.limits"):
            rules[name] = checks.optional(checks.must_be(SINGLE, _has_no_pairs))
            if isinstance(attrgetter(name)(self), Resources):
                rules[f"{name}.gpu"] = checks.optional(checks.must_be("a whole number", _is_number))
        return rules

    @property
    def num_gpus(self) -> int:
        """Number of GPUs in the limits of each Dask worker, or else in its requests. 0: no GPUs."""
        for resources in (self.workers.limits, self.workers.requests):
            if resources is not None and resources.gpu:
                return int(resources.gpu)
        return 0


@dataclass(frozen=True, kw_only=True)
class DaskDDP(_OnDask, config.GangOnDask):
    """Config of a task whose function runs in every rank of a gang on an ephemeral Dask cluster.

    Use `@task(task_config=DaskDDP(...))`. The task's output is rank 0's return value.

    Raises:
        ValueError: A field's value is invalid.

    Examples:
        Train in eight ranks, on four workers with two GPUs each. A call in Python starts the cluster on this machine:

        >>> from flytekit import Resources, task
        >>> from flytekitplugins.daskpytorch import DaskDDP, WorkerGroup, current_rank
        >>> workers = WorkerGroup(number_of_workers=4, limits=Resources(cpu="8", mem="32Gi", gpu="2"))
        >>> @task(task_config=DaskDDP(workers=workers))
        ... def train(epochs: int) -> int:
        ...     for epoch in range(epochs):
        ...         current_rank().log({"epoch": epoch + 1})
        ...     return epochs
        >>> train(epochs=3)
        3
    """


@dataclass(frozen=True, kw_only=True)
class SpawnDDP(config.GangOnOwnNode):
    """Config of a task whose function runs in every rank of a gang on the task's own node, without Dask.

    Use `@task(task_config=SpawnDDP(...))`. The task's output is rank 0's return value. For Flyte, the task is an
    ordinary Python task: its `requests` have the GPUs, and `accelerator`, `shared_memory` and `pod_template` work.

    DataLoader workers need shared memory. By default only the container's memory limits it. The task or its pod
    template may set a limit.

    Raises:
        ValueError: A field's value is invalid.

    Examples:
        >>> from flytekit import Resources, task
        >>> from flytekitplugins.daskpytorch import SpawnDDP, current_rank
        >>> @task(task_config=SpawnDDP(), requests=Resources(cpu="16", mem="64Gi", gpu="4"))
        ... def train(epochs: int) -> str:
        ...     return f"rank {current_rank().rank} of {current_rank().world_size}"  # of 4; of 1 on a laptop
        >>> train(epochs=3)
        'rank 0 of 1'
    """


@dataclass(frozen=True, kw_only=True)
class DaskCluster(_OnDask, config.Cluster):
    """Config of a task whose function runs once, with a Dask cluster whose client `current_client()` returns.

    Use `@task(task_config=DaskCluster(...))`.

    Raises:
        ValueError: A field's value is invalid.

    Examples:
        Train a model for each learning rate, side by side:

        >>> from flytekit import task
        >>> from flytekitplugins.daskpytorch import DaskCluster, WorkerGroup, current_client, dispatch
        >>> def train(rate: float) -> float:
        ...     return (rate - 0.3) ** 2  # stands for a held-out loss
        >>> @task(task_config=DaskCluster(workers=WorkerGroup(number_of_workers=2)))
        ... def sweep(rates: list[float]) -> float:
        ...     return min(dispatch.map(current_client(), train, rates).result())
        >>> sweep(rates=[0.1, 0.3])
        0.0
    """


def _has_no_pairs(resources: object) -> bool:
    is_one = isinstance(resources, Resources)
    return is_one and not any(isinstance(each, (list, tuple)) for each in vars(resources).values())


def _is_number(gpus: object) -> bool:
    return NUM_GPUS.fullmatch(str(gpus)) is not None


HOST.add(DaskDDP, DaskDDPTask)
HOST.add(SpawnDDP, SpawnDDPTask)
HOST.add(DaskCluster, DaskClusterTask)
if (
    sys.modules.get("flyte") is not None and find_spec("flyteplugins") and find_spec("flyteplugins.dask")
):  # Flyte 2's SDK
    import_module("flyteplugins.daskpytorch.task")
