"""Distributed PyTorch training, on ephemeral Dask clusters or on one node, as typed, cached, retryable Flyte tasks.

Importing it costs next to nothing, since every Dask worker and every rank does: flytekit, Dask and torch are imported
when they are needed. The task types are registered with flytekit when one of their configs is first made.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flytekitplugins.daskpytorch.context import LogRecord, RankContext, SavedCheckpoint, current_rank
from flytekitplugins.daskpytorch.errors import (
    GangError,
    GangHungError,
    GangStartError,
    PreemptedError,
    StoppedEarlyError,
    WorkerLostError,
)
from flytekitplugins.daskpytorch.extras import require_flytekit
from flytekitplugins.daskpytorch.goodput import Goodput, RankUsage
from flytekitplugins.daskpytorch.media import Histogram, Picture
from flytekitplugins.daskpytorch.process import log, streams
from flytekitplugins.daskpytorch.settings import EarlyStopping, Gang, Keep, Profile, Search, Wandb

streams.open_closed()  # now, before sockets are opened, and in the fork server before its ranks' channels come
log.set_up()

if TYPE_CHECKING:
    from distributed import Client
    from flytekitplugins.dask import Scheduler, WorkerGroup

    from flytekitplugins.daskpytorch.display.mlflow import MLflow
    from flytekitplugins.daskpytorch.display.tensorboard import TensorBoard
    from flytekitplugins.daskpytorch.flyte.config import DaskCluster, DaskDDP, SpawnDDP
    from flytekitplugins.daskpytorch.protocol.host import url_to_fs
    from flytekitplugins.daskpytorch.protocol.observer import Observer, RankObserver, Shape, Training
    from flytekitplugins.daskpytorch.rank.export import export_safetensors
    from flytekitplugins.daskpytorch.task.inputs import StrictInputs

__all__ = [
    "DaskCluster",
    "DaskDDP",
    "EarlyStopping",
    "Gang",
    "GangError",
    "GangHungError",
    "GangStartError",
    "Goodput",
    "Histogram",
    "Keep",
    "LogRecord",
    "MLflow",
    "Observer",
    "Picture",
    "PreemptedError",
    "Profile",
    "RankContext",
    "RankObserver",
    "RankUsage",
    "SavedCheckpoint",
    "Scheduler",
    "Search",
    "Shape",
    "SpawnDDP",
    "StoppedEarlyError",
    "StrictInputs",
    "TensorBoard",
    "Training",
    "Wandb",
    "WorkerGroup",
    "WorkerLostError",
    "current_client",
    "current_rank",
    "export_safetensors",
    "url_to_fs",
]


def current_client() -> Client:
    """The client of the cluster that this `DaskCluster` task runs on.

    Raises:
        RuntimeError: Called outside such a task.

    Examples:
        >>> from flytekit import task
        >>> from flytekitplugins.daskpytorch import DaskCluster, current_client
        >>> @task(task_config=DaskCluster())
        ... def lengths(names: list[str]) -> list[int]:
        ...     client = current_client()
        ...     return client.gather(client.map(len, names))
        >>> lengths(names=["Bello", "Mia"])
        [5, 3]
    """
    from flytekitplugins.daskpytorch.dask import cluster

    return cluster.current_client()


HOMES = {
    "DaskCluster": f"{__name__}.flyte.config",
    "DaskDDP": f"{__name__}.flyte.config",
    "MLflow": f"{__name__}.display.mlflow",
    "Observer": f"{__name__}.protocol.observer",
    "RankObserver": f"{__name__}.protocol.observer",
    "Scheduler": "flytekitplugins.dask",
    "Shape": f"{__name__}.protocol.observer",
    "SpawnDDP": f"{__name__}.flyte.config",
    "StrictInputs": f"{__name__}.task.inputs",
    "TensorBoard": f"{__name__}.display.tensorboard",
    "Training": f"{__name__}.protocol.observer",
    "WorkerGroup": "flytekitplugins.dask",
    "export_safetensors": f"{__name__}.rank.export",
    "url_to_fs": f"{__name__}.protocol.host",
}
"""The modules of what is imported when it is first named, with all that it needs."""
OF_FLYTEKIT = {"flytekitplugins.dask", f"{__name__}.flyte.config"}
"""Those of them that are nothing without it."""


def __getattr__(name: str) -> Any:
    if name in ("data", "dispatch", "report", "results"):
        return import_module(f"{__name__}.{name}")
    if name in HOMES:
        if HOMES[name] in OF_FLYTEKIT:
            require_flytekit(name)
        return getattr(import_module(HOMES[name]), name)
    if name == "__version__":
        return import_module("importlib.metadata").version("flytekitplugins-daskpytorch")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
