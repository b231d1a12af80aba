"""Adapter for Flyte 2: `DaskDDP`, `SpawnDDP` and `DaskCluster` as the `plugin_config` of a `flyte.TaskEnvironment`.

All other public names come from `flytekitplugins.daskpytorch`, as the same objects. `Scheduler` and `WorkerGroup` come
from `flyteplugins.dask`. The adapter works without flytekit.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from packaging.version import Version

import flytekitplugins.daskpytorch as engine
from flytekitplugins.daskpytorch.extras import require_extra

if TYPE_CHECKING:  # the public names, for type checkers and editors
    from flyteplugins.dask import Scheduler as Scheduler
    from flyteplugins.dask import WorkerGroup as WorkerGroup

    from flytekitplugins.daskpytorch import EarlyStopping as EarlyStopping
    from flytekitplugins.daskpytorch import Gang as Gang
    from flytekitplugins.daskpytorch import GangError as GangError
    from flytekitplugins.daskpytorch import GangHungError as GangHungError
    from flytekitplugins.daskpytorch import GangStartError as GangStartError
    from flytekitplugins.daskpytorch import Goodput as Goodput
    from flytekitplugins.daskpytorch import Histogram as Histogram
    from flytekitplugins.daskpytorch import Keep as Keep
    from flytekitplugins.daskpytorch import LogRecord as LogRecord
    from flytekitplugins.daskpytorch import MLflow as MLflow
    from flytekitplugins.daskpytorch import Observer as Observer
    from flytekitplugins.daskpytorch import Picture as Picture
    from flytekitplugins.daskpytorch import PreemptedError as PreemptedError
    from flytekitplugins.daskpytorch import Profile as Profile
    from flytekitplugins.daskpytorch import RankContext as RankContext
    from flytekitplugins.daskpytorch import RankObserver as RankObserver
    from flytekitplugins.daskpytorch import RankUsage as RankUsage
    from flytekitplugins.daskpytorch import SavedCheckpoint as SavedCheckpoint
    from flytekitplugins.daskpytorch import Search as Search
    from flytekitplugins.daskpytorch import Shape as Shape
    from flytekitplugins.daskpytorch import StoppedEarlyError as StoppedEarlyError
    from flytekitplugins.daskpytorch import StrictInputs as StrictInputs
    from flytekitplugins.daskpytorch import TensorBoard as TensorBoard
    from flytekitplugins.daskpytorch import Training as Training
    from flytekitplugins.daskpytorch import Wandb as Wandb
    from flytekitplugins.daskpytorch import WorkerLostError as WorkerLostError
    from flytekitplugins.daskpytorch import current_client as current_client
    from flytekitplugins.daskpytorch import current_rank as current_rank
    from flytekitplugins.daskpytorch import export_safetensors as export_safetensors
    from flytekitplugins.daskpytorch import url_to_fs as url_to_fs
    from flyteplugins.daskpytorch.config import DaskCluster as DaskCluster
    from flyteplugins.daskpytorch.config import DaskDDP as DaskDDP
    from flyteplugins.daskpytorch.config import SpawnDDP as SpawnDDP

OWN = ("DaskCluster", "DaskDDP", "Scheduler", "SpawnDDP", "WorkerGroup")
"""Public names whose objects differ from those of `flytekitplugins.daskpytorch`."""
OLDEST = "2.12"
"""Oldest version of Flyte 2's SDK that works with this package."""

if not TYPE_CHECKING:  # type checkers go by the imports above
    __all__ = engine.__all__


def __getattr__(name: str) -> Any:
    if name in OWN:
        require_extra("flyte2", f"flyteplugins.daskpytorch.{name}")
        _refuse_old(name)
        return getattr(import_module(f"{__name__}.config"), name)
    if name in (*engine.HOMES, *engine.MODULES, "__version__"):
        return getattr(engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *engine.MODULES, *engine.HOMES})


def _refuse_old(name: str) -> None:
    """Check that Flyte 2's SDK is at least version `OLDEST`.

    Raises:
        ImportError: The installed version is older. The message says how to upgrade.
    """
    for package in ("flyte", "flyteplugins-dask"):
        if Version(found := version(package)) < Version(OLDEST):
            raise ImportError(
                f"flyteplugins.daskpytorch.{name} needs {package} from {OLDEST} on; here it is {found}: "
                "pip install -U 'flytekitplugins-daskpytorch[flyte2]'"
            )
