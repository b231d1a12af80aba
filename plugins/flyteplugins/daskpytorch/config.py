"""Configs of Flyte 2's tasks. Loaded where environments are defined, and imports no torch.

The import registers the task types with Flyte.
"""

import sys
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from flyte import Resources
from flyte.extend import TaskPluginRegistry
from flyteplugins.dask import Scheduler, WorkerGroup

from flytekitplugins.daskpytorch import checks
from flytekitplugins.daskpytorch.checks import Rule
from flytekitplugins.daskpytorch.task import config
from flyteplugins.daskpytorch.task import DaskClusterTask, DaskDDPTask, SpawnDDPTask, num_gpus


@dataclass(frozen=True, kw_only=True)
class _OnDask(config.OnDask):
    """Base of the configs of tasks that have a Dask cluster: its scheduler and its workers."""

    KINDS = {"scheduler": Scheduler, "workers": WorkerGroup}  # noqa: RUF012 - as its base has it

    scheduler: Scheduler = field(default_factory=Scheduler)
    """Image and resources of the Dask scheduler's pod."""
    workers: WorkerGroup = field(default_factory=lambda: WorkerGroup(number_of_workers=2))
    """Number, image and resources of the Dask workers' pods. Default: two workers."""

    def _rules_of_pods(self) -> dict[str, Rule]:
        resources = checks.optional(checks.must_be("a flyte.Resources", lambda value: isinstance(value, Resources)))
        return super()._rules_of_pods() | {"workers.resources": resources, "scheduler.resources": resources}

    @property
    def num_gpus(self) -> int:
        """Number of GPUs in the resources of each Dask worker. 0: no GPUs."""
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
    """Config of tasks whose functions run once, with a Dask cluster whose client `current_client()` returns.

    Use `TaskEnvironment(plugin_config=DaskCluster(...))`.
    """


# ---- Configs for flytekit, for flyte-migrate


def _join_flyte_migrate() -> None:
    """Let the tool flyte-migrate convert this package's configs, so that workflows for flytekit run under Flyte 2."""
    from flyte_migrate._plugins import register_plugin

    for kind in (DaskCluster, DaskDDP, SpawnDDP):
        register_plugin(kind.__name__, partial(_converted, kind))


def _converted(kind: type, config: Any) -> Any:
    """Convert a config for flytekit to the config of the class `kind` for Flyte 2."""
    pods = _pods(config) if hasattr(config, "workers") else {}
    return kind(**{each.name: getattr(config, each.name) for each in fields(kind)} | pods)


def _pods(config: Any) -> dict[str, Any]:
    of_scheduler, of_workers = (
        {"image": pods.image, "resources": _resources(pods.requests, pods.limits)}
        for pods in (config.scheduler, config.workers)
    )
    workers = WorkerGroup(number_of_workers=config.workers.number_of_workers, **of_workers)
    return {"scheduler": Scheduler(**of_scheduler), "workers": workers}


def _resources(requests: Any, limits: Any) -> Any:
    """Convert flytekit's requests and limits to a `flyte.Resources`, by flyte-migrate, with the GPUs as a number."""
    from flyte_migrate._resource import _transform_resource_v1_to_v2

    gpus = next((each.gpu for each in (limits, requests) if each is not None and each.gpu), None)
    bare = [replace(each, gpu=None) if each is not None else None for each in (requests, limits)]
    made = _transform_resource_v1_to_v2(requests=bare[0], limits=bare[1])
    return replace(made, gpu=int(gpus)) if gpus else made


HOST = config.Host(sdk="Flyte 2's SDK", package="flyteplugins.daskpytorch", register=TaskPluginRegistry.register)
HOST.add(DaskDDP, DaskDDPTask)
HOST.add(SpawnDDP, SpawnDDPTask)
HOST.add(DaskCluster, DaskClusterTask)
if "flyte_migrate" in sys.modules:  # flyte-migrate converts only configs that it knows
    _join_flyte_migrate()
