"""What a user may ask of a task of Flyte 2. Read where environments are defined; imports no torch.

Importing it registers the task types with Flyte.
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
    """The cluster that a task asks for."""

    KINDS = {"scheduler": Scheduler, "workers": WorkerGroup}  # noqa: RUF012 - as its base has it

    scheduler: Scheduler = field(default_factory=Scheduler)
    """The scheduler pod's image and resources."""
    workers: WorkerGroup = field(default_factory=lambda: WorkerGroup(number_of_workers=2))
    """The worker pods' number, image and resources."""

    def _rules_of_pods(self) -> dict[str, Rule]:
        resources = checks.optional(checks.must_be("a flyte.Resources", lambda value: isinstance(value, Resources)))
        return super()._rules_of_pods() | {"workers.resources": resources, "scheduler.resources": resources}

    @property
    def num_gpus(self) -> int:
        """GPUs that each worker asks for."""
        return num_gpus(self.workers.resources)


@dataclass(frozen=True, kw_only=True)
class DaskDDP(_OnDask, config.GangOnDask):
    """`TaskEnvironment(plugin_config=DaskDDP(...))`: its functions run in every rank of a gang on a Dask cluster.

    Rank 0's return value is the task's output.
    """


@dataclass(frozen=True, kw_only=True)
class SpawnDDP(config.GangOnOwnNode):
    """`TaskEnvironment(plugin_config=SpawnDDP(...))`: its functions run in every rank of a gang on the task's own node.

    No Dask. Rank 0's return value is the task's output. For Flyte it is an ordinary Python task: GPUs, and the shared
    memory that DataLoader workers need, are asked for in the environment's `resources`.
    """


@dataclass(frozen=True, kw_only=True)
class DaskCluster(_OnDask, config.Cluster):
    """`TaskEnvironment(plugin_config=DaskCluster(...))`: its functions run once, with `current_client()` at hand."""


HOST = config.Host(sdk="Flyte 2's SDK", package="flyteplugins.daskpytorch", register=TaskPluginRegistry.register)
HOST.add(DaskDDP, DaskDDPTask)
HOST.add(SpawnDDP, SpawnDDPTask)
HOST.add(DaskCluster, DaskClusterTask)
if "flyte_migrate" in sys.modules:  # which knows nothing of flytekit's own
    import_module("flyteplugins.daskpytorch.migrate")
