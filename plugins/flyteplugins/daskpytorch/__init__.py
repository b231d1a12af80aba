"""The same for Flyte 2: `DaskDDP`, `SpawnDDP` and `DaskCluster` as the `plugin_config` of a `flyte.TaskEnvironment`.

All else that training code imports from `flytekitplugins.daskpytorch` is here, too: the same objects. flytekit need not
be installed. `Scheduler`, `WorkerGroup` are those of `flyteplugins.dask`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from packaging.version import Version

import flytekitplugins.daskpytorch as engine
from flytekitplugins.daskpytorch import (
    EarlyStopping,
    Gang,
    GangError,
    GangHungError,
    GangStartError,
    Goodput,
    Histogram,
    Keep,
    LogRecord,
    Picture,
    PreemptedError,
    Profile,
    RankContext,
    RankUsage,
    SavedCheckpoint,
    Search,
    StoppedEarlyError,
    Wandb,
    WorkerLostError,
    current_client,
    current_rank,
)
from flytekitplugins.daskpytorch.extras import require_extra

if TYPE_CHECKING:
    from flyteplugins.dask import Scheduler, WorkerGroup

    from flytekitplugins.daskpytorch import (
        MLflow,
        Observer,
        RankObserver,
        Shape,
        StrictInputs,
        TensorBoard,
        Training,
        export_safetensors,
        url_to_fs,
    )
    from flyteplugins.daskpytorch.config import DaskCluster, DaskDDP, SpawnDDP

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

HOMES = dict.fromkeys(("DaskCluster", "DaskDDP", "Scheduler", "SpawnDDP", "WorkerGroup"), f"{__name__}.config")
"""The modules of what is another thing here."""
OLDEST = "2.12"
"""The first version that has what is used here."""
MODULES = ("data", "dispatch", "report", "results")


def __getattr__(name: str) -> Any:
    if name in HOMES:
        require_extra("flyte2", f"flyteplugins.daskpytorch.{name}")
        _refuse_old(name)
        return getattr(import_module(HOMES[name]), name)
    if name in __all__ or name in MODULES or name == "__version__":
        return getattr(engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _refuse_old(name: str) -> None:
    """See that Flyte 2's SDK is as new as is needed.

    Raises:
        ImportError: It is not; the message says how to install it.
    """
    for package in ("flyte", "flyteplugins-dask"):
        if Version(found := version(package)) < Version(OLDEST):
            raise ImportError(
                f"flyteplugins.daskpytorch.{name} needs {package} from {OLDEST} on; here it is {found}: "
                "pip install -U 'flytekitplugins-daskpytorch[flyte2]'"
            )
