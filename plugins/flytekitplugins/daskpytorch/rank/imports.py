"""Calls that wait for an import, and cost nothing where it does not come."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def call_after(name: str, call: Callable[[ModuleType], object]) -> None:
    """Call this with a module once it has been imported; now, if it has been already."""
    if (module := sys.modules.get(name)) is not None:
        call(module)
    else:
        sys.meta_path.insert(0, _Waiting(name, call))


class _Waiting(MetaPathFinder):
    def __init__(self, name: str, call: Callable[[ModuleType], object]) -> None:
        self._name = name
        self._call = call

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                execute(module)
                self._call(module)

            spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec
