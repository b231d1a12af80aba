"""What waits for an import, and costs nothing where it does not come. Runs in ranks, and in a command's driver."""

import functools
import gc
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

__all__ = ["call_after", "spare_collections"]

Execute = Callable[[ModuleType], None]


def call_after(name: str, call: Callable[[ModuleType], object]) -> None:
    """Call this with a module once it has been imported; now, if it has been already."""
    if (module := sys.modules.get(name)) is not None:
        call(module)
    else:
        sys.meta_path.insert(0, _Waiting(name, functools.partial(_execute_and_call, call)))


def spare_collections(name: str) -> None:
    """Have a large module imported without garbage collections, which find nothing and take a sixth of the time."""
    if name not in sys.modules:
        sys.meta_path.insert(0, _Waiting(name, _execute_uncollected))


def _execute_and_call(call: Callable[[ModuleType], object], execute: Execute, module: ModuleType) -> None:
    execute(module)
    call(module)


def _execute_uncollected(execute: Execute, module: ModuleType) -> None:
    restore = gc.enable if gc.isenabled() else gc.disable
    gc.disable()
    try:
        execute(module)
    finally:
        restore()


class _Waiting(MetaPathFinder):
    def __init__(self, name: str, execute: Callable[[Execute, ModuleType], None]) -> None:
        self._name = name
        self._execute = execute

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            execute = functools.partial(self._execute, spec.loader.exec_module)
            spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec
