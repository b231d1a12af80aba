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

if TYPE_CHECKING:  # for type checkers and editors
    from flyteplugins.dask import Scheduler as Scheduler
    from flyteplugins.dask import WorkerGroup as WorkerGroup

    from flytekitplugins.daskpytorch.public import *  # noqa: F403
    from flyteplugins.daskpytorch.config import DaskCluster as DaskCluster
    from flyteplugins.daskpytorch.config import DaskDDP as DaskDDP
    from flyteplugins.daskpytorch.config import SpawnDDP as SpawnDDP

OLDEST = "2.12"
"""Minimum version of Flyte 2's SDK (`flyte` and `flyteplugins-dask`) for this package."""

if not TYPE_CHECKING:  # type checkers go by the imports above
    __all__ = engine.NAMES  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name in engine.OF_FLYTE:
        require_extra("flyte2", f"flyteplugins.daskpytorch.{name}")
        _refuse_old(name)
        return getattr(import_module(f"{__name__}.config"), name)
    if name in (*engine.HOMES, *engine.MODULES, "__version__"):
        return getattr(engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *engine.MODULES, *engine.NAMES})


def _refuse_old(name: str) -> None:
    """Check that Flyte 2's SDK is new enough. `name` is the public name that needs the SDK, for the error.

    Raises:
        ImportError: The installed version is older. The message says how to upgrade.
    """
    for package in ("flyte", "flyteplugins-dask"):
        if Version(found := version(package)) < Version(OLDEST):
            raise ImportError(
                f"flyteplugins.daskpytorch.{name} needs {package} from {OLDEST} on; here it is {found}: "
                "pip install -U 'flytekitplugins-daskpytorch[flyte2]'"
            )
