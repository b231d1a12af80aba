"""flytekit, imported once for all programs of the tests; a program that imports it has what it reads then read anew.

Until a program imports it, it is nowhere to be found in that program, as if it had not been imported.
"""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib import metadata
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAME = "flytekit"
READ_ONCE = (
    "FLYTE_PYTHON_PACKAGE_ROOT",
    "FLYTE_DEFAULT_PROJECT",
    "FLYTE_DEFAULT_DOMAIN",
    "_F_P_WRITE_CHUNK_SIZE",
    "_F_TE_MAX_COROS",
)
"""What it reads in the middle of its import, and keeps in many places; a program that has one imports it itself."""


def import_aside() -> None:
    """Import it, with its command line, without its plugins; leaves no trace but what it imports of others."""
    all_entry_points, excepthook, handler = metadata.entry_points, sys.excepthook, signal.getsignal(signal.SIGINT)

    def no_plugins(**choice: Any) -> Any:
        return () if choice.get("group") == "flytekit.plugins" else all_entry_points(**choice)

    variables = dict(os.environ)
    metadata.entry_points = no_plugins  # type: ignore[assignment]
    importlib.import_module("flytekit.clis.sdk_in_container.pyflyte")
    metadata.entry_points = all_entry_points
    os.environ.clear()
    os.environ.update(variables)
    sys.excepthook = excepthook
    signal.signal(signal.SIGINT, handler)
    names = [name for name in sys.modules if name == NAME or name.startswith(f"{NAME}.")]
    aside = {name: sys.modules.pop(name) for name in names}
    aside[NAME].entry_points = all_entry_points  # type: ignore[attr-defined]
    for folder in _folders(aside):
        shutil.rmtree(folder)
    sys.meta_path.insert(0, _Aside(aside))


class _Aside(MetaPathFinder, Loader):
    """Finds what was imported, until it is imported again."""

    def __init__(self, aside: dict[str, ModuleType]) -> None:
        self._aside = aside
        self._spec = aside[NAME].__spec__

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != NAME or self._spec is None or os.environ.keys() & READ_ONCE:
            return None
        return ModuleSpec(name, self, origin=self._spec.origin, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._aside[NAME]

    def exec_module(self, module: ModuleType) -> None:
        sys.meta_path.remove(self)
        module.__spec__ = self._spec
        sys.modules.update(self._aside)
        _read_anew(self._aside)


def _folders(aside: dict[str, ModuleType]) -> list[str]:
    """Those that it makes when it is imported."""
    return [
        aside["flytekit.configuration"].Config.local_sandbox_path,
        aside["flytekit.core.data_persistence"].flyte_tmp_dir,
    ]


def _read_anew(aside: dict[str, ModuleType]) -> None:
    """Do what its import does for the process that it is imported in, in the same order."""
    config, persistence = aside["flytekit.configuration"].Config, aside["flytekit.core.data_persistence"]
    sandbox = tempfile.mkdtemp(prefix="flyte")
    config.__init__.__defaults__ = _replaced(config.__init__.__defaults__, config.local_sandbox_path, sandbox)
    config.__dataclass_fields__["local_sandbox_path"].default = config.local_sandbox_path = sandbox
    aside["flytekit.loggers"].initialize_global_loggers()
    persistence.flyte_tmp_dir = folder = tempfile.mkdtemp(prefix="flyte-")
    provider = persistence.FileAccessProvider(
        local_sandbox_dir=os.path.join(folder, "sandbox"),  # noqa: PTH118 - as flytekit does
        raw_output_prefix=os.path.join(folder, "raw"),  # noqa: PTH118
        data_config=aside["flytekit.configuration"].DataConfig.auto(),
    )
    contexts = aside["flytekit.core.context_manager"]
    persistence.default_local_file_access_provider = contexts.default_local_file_access_provider = provider
    contexts.FlyteContextManager.initialize()
    flytekit = aside[NAME]
    flytekit.load_implicit_plugins()
    if os.environ.get(flytekit.LOGGING_RICH_FMT_ENV_VAR) != "0":
        flytekit.traceback.install(width=None, extra_lines=0)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its command line does


def _replaced(values: Iterable[Any], old: Any, new: Any) -> tuple[Any, ...]:
    return tuple(new if value == old else value for value in values)
