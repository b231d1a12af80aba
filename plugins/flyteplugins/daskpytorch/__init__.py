"""Adapter for Flyte 2: `DaskDDP`, `SpawnDDP` and `DaskCluster` as the `plugin_config` of a `flyte.TaskEnvironment`.

All other public names come from `flytekitplugins.daskpytorch`, as the same objects. `Scheduler` and `WorkerGroup` come
from `flyteplugins.dask`. The adapter works without flytekit.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import flytekitplugins.daskpytorch as engine
from flytekitplugins.daskpytorch.checks import require_extra

if TYPE_CHECKING:  # for type checkers and editors
    from flyteplugins.dask import Scheduler as Scheduler
    from flyteplugins.dask import WorkerGroup as WorkerGroup

    from flytekitplugins.daskpytorch.public import *  # noqa: F403
    from flyteplugins.daskpytorch.task import DaskCluster as DaskCluster
    from flyteplugins.daskpytorch.task import DaskDDP as DaskDDP
    from flyteplugins.daskpytorch.task import SpawnDDP as SpawnDDP

if not TYPE_CHECKING:  # type checkers go by the imports above
    __all__ = engine.NAMES  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name in engine.OF_FLYTE:
        require_extra("flyte2", f"flyteplugins.daskpytorch.{name}")
        return getattr(import_module(f"{__name__}.task"), name)
    if name in (*engine.HOMES, *engine.MODULES, "__version__"):
        return getattr(engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *engine.MODULES, *engine.NAMES})
