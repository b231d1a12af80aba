"""Plugin for flyte-migrate that converts this package's configs, so that files for flytekit run under Flyte 2.

Imported if both this package and `flyte_migrate` are in use.
"""

from dataclasses import replace
from typing import Any

from flyte_migrate._plugins import register_plugin
from flyte_migrate._resource import _transform_resource_v1_to_v2
from flyteplugins.dask import Scheduler, WorkerGroup

from flyteplugins.daskpytorch.config import DaskCluster, DaskDDP, SpawnDDP


def dask_ddp(config: Any) -> DaskDDP:
    """Convert a `DaskDDP` for flytekit to the one for Flyte 2."""
    return DaskDDP(gang=config.gang, wandb=config.wandb, **_pods(config))


def dask_cluster(config: Any) -> DaskCluster:
    """Convert a `DaskCluster` for flytekit to the one for Flyte 2."""
    return DaskCluster(start_timeout=config.start_timeout, **_pods(config))


def spawn_ddp(config: Any) -> SpawnDDP:
    """Convert a `SpawnDDP` for flytekit to the one for Flyte 2."""
    return SpawnDDP(nproc=config.nproc, gang=config.gang, wandb=config.wandb, start_method=config.start_method)


def _pods(config: Any) -> dict[str, Any]:
    of_scheduler, of_workers = (
        {"image": pods.image, "resources": _resources(pods.requests, pods.limits)}
        for pods in (config.scheduler, config.workers)
    )
    workers = WorkerGroup(number_of_workers=config.workers.number_of_workers, **of_workers)
    return {"scheduler": Scheduler(**of_scheduler), "workers": workers}


def _resources(requests: Any, limits: Any) -> Any:
    """Convert resources as flyte-migrate does, but GPUs to a number, which `flyte.Resources` requires."""
    gpus = next((each.gpu for each in (limits, requests) if each is not None and each.gpu), None)
    bare = [replace(each, gpu=None) if each is not None else None for each in (requests, limits)]
    made = _transform_resource_v1_to_v2(requests=bare[0], limits=bare[1])
    return replace(made, gpu=int(gpus)) if gpus else made


register_plugin("DaskCluster", dask_cluster)
register_plugin("DaskDDP", dask_ddp)
register_plugin("SpawnDDP", spawn_ddp)
