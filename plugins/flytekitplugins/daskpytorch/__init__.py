"""Distributed PyTorch training, on ephemeral Dask clusters or on one node, as typed, cached, retryable Flyte tasks.

Every Dask worker and every rank imports this package, so the import is cheap. The first use of a name imports what the
name needs: flytekit, Dask or torch. The first use of a task config registers the task types with flytekit.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flytekitplugins.daskpytorch.process import streams

if TYPE_CHECKING:  # for type checkers and editors
    from flytekitplugins.dask import Scheduler as Scheduler
    from flytekitplugins.dask import WorkerGroup as WorkerGroup

    from flytekitplugins.daskpytorch.flyte.task import DaskCluster as DaskCluster
    from flytekitplugins.daskpytorch.flyte.task import DaskDDP as DaskDDP
    from flytekitplugins.daskpytorch.flyte.task import SpawnDDP as SpawnDDP
    from flytekitplugins.daskpytorch.public import *  # noqa: F403

_public = Path(__file__).with_name("public.py").read_text(encoding="utf-8")
HOMES = {name: module for module, name in re.findall(r"^from (\S+) import (\w+) as", _public, re.MULTILINE)}
"""Module that defines each public name, by `public.py`. The first use of a name imports the module."""
OF_FLYTE = ("DaskCluster", "DaskDDP", "Scheduler", "SpawnDDP", "WorkerGroup")
"""Public names whose objects differ between flytekit and Flyte 2. The adapter's module `task` has them."""
MODULES = ("data", "dispatch", "errors", "report", "results")
"""Imported when first used as attributes."""
NAMES = [*HOMES, *OF_FLYTE]

if not TYPE_CHECKING:  # type checkers go by the imports above
    __all__ = NAMES  # noqa: PLE0605

streams.set_up()


def __getattr__(name: str) -> Any:
    if name in MODULES:
        return import_module(f"{__name__}.{name}")
    if name in HOMES:
        return getattr(import_module(HOMES[name]), name)
    if name in OF_FLYTE:
        from flytekitplugins.daskpytorch.checks import require_flytekit

        require_flytekit(name)
        return getattr(import_module(f"{__name__}.flyte.task"), name)
    if name == "__version__":
        return import_module("importlib.metadata").version("flytekitplugins-daskpytorch")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *MODULES, *NAMES})
