"""Distributed PyTorch training, on ephemeral Dask clusters or on one node, as typed, cached, retryable Flyte tasks.

Importing it registers the task types with flytekit. Neither Dask nor torch is imported before they are needed.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from flytekitplugins.daskpytorch import task as _register_task_types  # noqa: F401
from flytekitplugins.daskpytorch.blame import (
    GangError,
    GangHungError,
    GangStartError,
    PreemptedError,
    StoppedEarlyError,
    WorkerLostError,
)
from flytekitplugins.daskpytorch.config import (
    DaskCluster,
    DaskDDP,
    EarlyStopping,
    Gang,
    Scheduler,
    SpawnDDP,
    Wandb,
    WorkerGroup,
)
from flytekitplugins.daskpytorch.context import RankContext, current_rank
from flytekitplugins.daskpytorch.inputs import StrictInputs

if TYPE_CHECKING:
    from distributed import Client

__all__ = [
    "DaskCluster",
    "DaskDDP",
    "EarlyStopping",
    "Gang",
    "GangError",
    "GangHungError",
    "GangStartError",
    "PreemptedError",
    "RankContext",
    "Scheduler",
    "SpawnDDP",
    "StoppedEarlyError",
    "StrictInputs",
    "Wandb",
    "WorkerGroup",
    "WorkerLostError",
    "current_client",
    "current_rank",
]

__version__ = version("flytekitplugins-daskpytorch")


def current_client() -> Client:
    """The client of the cluster that this `DaskCluster` task runs on.

    Raises:
        RuntimeError: Called outside such a task.
    """
    from flytekitplugins.daskpytorch import cluster

    return cluster.current_client()


def __getattr__(name: str) -> Any:
    """`daskpytorch.data`, `dispatch` and `results`, imported with what they need when they are first named."""
    if name in ("data", "dispatch", "results"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
