"""Distributed PyTorch training, on ephemeral Dask clusters or on one node, as typed, cached, retryable Flyte tasks.

Every Dask worker and every rank imports this package, so the import is cheap. The first use of a name imports what the
name needs: flytekit, Dask or torch. The first use of a task config registers the task types with flytekit.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flytekitplugins.daskpytorch import extras
from flytekitplugins.daskpytorch.process import log, streams

if TYPE_CHECKING:  # the public names, for type checkers and editors
    from flytekitplugins.dask import Scheduler as Scheduler
    from flytekitplugins.dask import WorkerGroup as WorkerGroup

    from flytekitplugins.daskpytorch.context import LogRecord as LogRecord
    from flytekitplugins.daskpytorch.context import RankContext as RankContext
    from flytekitplugins.daskpytorch.context import SavedCheckpoint as SavedCheckpoint
    from flytekitplugins.daskpytorch.context import current_rank as current_rank
    from flytekitplugins.daskpytorch.dask.cluster import current_client as current_client
    from flytekitplugins.daskpytorch.display.mlflow import MLflow as MLflow
    from flytekitplugins.daskpytorch.display.tensorboard import TensorBoard as TensorBoard
    from flytekitplugins.daskpytorch.errors import GangError as GangError
    from flytekitplugins.daskpytorch.errors import GangHungError as GangHungError
    from flytekitplugins.daskpytorch.errors import GangStartError as GangStartError
    from flytekitplugins.daskpytorch.errors import PreemptedError as PreemptedError
    from flytekitplugins.daskpytorch.errors import StoppedEarlyError as StoppedEarlyError
    from flytekitplugins.daskpytorch.errors import WorkerLostError as WorkerLostError
    from flytekitplugins.daskpytorch.flyte.config import DaskCluster as DaskCluster
    from flytekitplugins.daskpytorch.flyte.config import DaskDDP as DaskDDP
    from flytekitplugins.daskpytorch.flyte.config import SpawnDDP as SpawnDDP
    from flytekitplugins.daskpytorch.goodput import Goodput as Goodput
    from flytekitplugins.daskpytorch.goodput import RankUsage as RankUsage
    from flytekitplugins.daskpytorch.media import Histogram as Histogram
    from flytekitplugins.daskpytorch.media import Picture as Picture
    from flytekitplugins.daskpytorch.protocol.host import url_to_fs as url_to_fs
    from flytekitplugins.daskpytorch.protocol.observer import Observer as Observer
    from flytekitplugins.daskpytorch.protocol.observer import RankObserver as RankObserver
    from flytekitplugins.daskpytorch.protocol.observer import Shape as Shape
    from flytekitplugins.daskpytorch.protocol.observer import Training as Training
    from flytekitplugins.daskpytorch.rank.export import export_safetensors as export_safetensors
    from flytekitplugins.daskpytorch.settings import EarlyStopping as EarlyStopping
    from flytekitplugins.daskpytorch.settings import Gang as Gang
    from flytekitplugins.daskpytorch.settings import Keep as Keep
    from flytekitplugins.daskpytorch.settings import Profile as Profile
    from flytekitplugins.daskpytorch.settings import Search as Search
    from flytekitplugins.daskpytorch.settings import Wandb as Wandb
    from flytekitplugins.daskpytorch.task.inputs import StrictInputs as StrictInputs

NAMES_IN = {
    "flytekitplugins.dask": ("Scheduler", "WorkerGroup"),
    f"{__name__}.context": ("LogRecord", "RankContext", "SavedCheckpoint", "current_rank"),
    f"{__name__}.dask.cluster": ("current_client",),
    f"{__name__}.display.mlflow": ("MLflow",),
    f"{__name__}.display.tensorboard": ("TensorBoard",),
    f"{__name__}.errors": (
        *("GangError", "GangHungError", "GangStartError", "PreemptedError", "StoppedEarlyError", "WorkerLostError"),
    ),
    f"{__name__}.flyte.config": ("DaskCluster", "DaskDDP", "SpawnDDP"),
    f"{__name__}.goodput": ("Goodput", "RankUsage"),
    f"{__name__}.media": ("Histogram", "Picture"),
    f"{__name__}.protocol.host": ("url_to_fs",),
    f"{__name__}.protocol.observer": ("Observer", "RankObserver", "Shape", "Training"),
    f"{__name__}.rank.export": ("export_safetensors",),
    f"{__name__}.settings": ("EarlyStopping", "Gang", "Keep", "Profile", "Search", "Wandb"),
    f"{__name__}.task.inputs": ("StrictInputs",),
}
"""Public names, by the module that is imported when a name is first used."""
HOMES = {name: module for module, names in NAMES_IN.items() for name in names}
OF_FLYTEKIT = {"flytekitplugins.dask", f"{__name__}.flyte.config"}
"""Modules of `NAMES_IN` that need flytekit."""
MODULES = ("data", "dispatch", "errors", "report", "results")
"""Public modules that are imported when they are first used as attributes."""

if not TYPE_CHECKING:  # type checkers go by the imports above
    __all__ = list(HOMES)

streams.open_closed()  # before sockets are opened, and in the fork server before its ranks' channels
log.set_up()


def __getattr__(name: str) -> Any:
    if name in MODULES:
        return import_module(f"{__name__}.{name}")
    if name in HOMES:
        if HOMES[name] in OF_FLYTEKIT:
            extras.require_flytekit(name)
        return getattr(import_module(HOMES[name]), name)
    if name == "__version__":
        return import_module("importlib.metadata").version("flytekitplugins-daskpytorch")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *MODULES, *HOMES})
