"""Configs of Flyte 2's tasks. Loaded where environments are defined, and imports no torch.

The import registers the task types with Flyte.
"""

import sys
from dataclasses import dataclass, field
from importlib import import_module

from flyte import Resources
from flyte.extend import TaskPluginRegistry
from flyteplugins.dask import Scheduler, WorkerGroup

from flytekitplugins.daskpytorch import checks
from flytekitplugins.daskpytorch.checks import Rule
from flytekitplugins.daskpytorch.task import config
from flyteplugins.daskpytorch.task import DaskClusterTask, DaskDDPTask, SpawnDDPTask, num_gpus


@dataclass(frozen=True, kw_only=True)
class _OnDask(config.OnDask):
    """Dask cluster of a task: its scheduler and its workers."""

    KINDS = {"scheduler": Scheduler, "workers": WorkerGroup}  # noqa: RUF012 - as its base has it

    scheduler: Scheduler = field(default_factory=Scheduler)
    """Image and resources of the scheduler's pod."""
    workers: WorkerGroup = field(default_factory=lambda: WorkerGroup(number_of_workers=2))
    """Number, image and resources of the workers' pods. Default: two workers."""

    def _rules_of_pods(self) -> dict[str, Rule]:
        resources = checks.optional(checks.must_be("a flyte.Resources", lambda value: isinstance(value, Resources)))
        return super()._rules_of_pods() | {"workers.resources": resources, "scheduler.resources": resources}

    @property
    def num_gpus(self) -> int:
        """Number of GPUs in each worker's resources. 0: no GPUs."""
        return num_gpus(self.workers.resources)


@dataclass(frozen=True, kw_only=True)
class DaskDDP(_OnDask, config.GangOnDask):
    """Config of tasks whose functions run in every rank of a gang on an ephemeral Dask cluster.

    Use `TaskEnvironment(plugin_config=DaskDDP(...))`. A task's output is rank 0's return value.
    """


@dataclass(frozen=True, kw_only=True)
class SpawnDDP(config.GangOnOwnNode):
    """Config of tasks whose functions run in every rank of a gang on the task's own node, without Dask.

    Use `TaskEnvironment(plugin_config=SpawnDDP(...))`. A task's output is rank 0's return value. For Flyte, the task is
    an ordinary Python task. The environment's `resources` have its GPUs, and the shared memory that DataLoader workers
    need.
    """


@dataclass(frozen=True, kw_only=True)
class DaskCluster(_OnDask, config.Cluster):
    """Config of tasks whose functions run once, with a Dask cluster that `current_client()` is connected to.

    Use `TaskEnvironment(plugin_config=DaskCluster(...))`.
    """


HOST = config.Host(sdk="Flyte 2's SDK", package="flyteplugins.daskpytorch", register=TaskPluginRegistry.register)
HOST.add(DaskDDP, DaskDDPTask)
HOST.add(SpawnDDP, SpawnDDPTask)
HOST.add(DaskCluster, DaskClusterTask)
if "flyte_migrate" in sys.modules:  # flyte-migrate converts only configs that it knows
    import_module("flyteplugins.daskpytorch.migrate")
