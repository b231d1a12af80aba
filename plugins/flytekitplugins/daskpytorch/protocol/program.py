"""State of the user's program: `__main__`, command line, logging and settings of torch.

The driver reads the state, and each rank applies the state to itself.
"""

import contextlib
import linecache
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from flytekitplugins.daskpytorch.protocol import pickling

MAX_SPARE_PART = 256 << 10
"""Maximum number of bytes of a pickled class of `__main__` that ranks get apart from the call. Larger classes are left
out."""
TORCH_DEFAULTS = {
    "default_dtype": "float32",
    "matmul_precision": "highest",
    "deterministic_mode": 0,  # 1 warns of other algorithms, 2 raises
    "cudnn": (False, False),  # deterministic, benchmark
}
"""Torch's defaults of the settings that ranks get, by name."""


@dataclass(frozen=True, kw_only=True)
class _Logger:
    level: int
    propagate: bool
    handlers: Sequence[bytes]
    """Pickled stream, level and formatter of each handler that writes to a standard stream."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """State of the driver's program for the ranks. The user's objects are bytes here."""

    arguments: Sequence[str] | None = field(default=None, repr=False)
    """Command-line arguments of the user's script. None if the program is not the user's, such as pyflyte."""
    module: str | None = None
    """Name of the user's module that `python -m` ran. None for a script."""
    package: str | None = None
    spare_parts: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """Name -> pickled class of `__main__`, for ranks that load files with objects of the class."""
    cells: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Name -> text of source code without a file, such as a notebook's cells."""
    loggers: Mapping[str, _Logger] = field(default_factory=dict)
    """Name -> logger with settings other than logging's defaults. The root logger's name is empty."""
    torch: Mapping[str, Any] = field(default_factory=dict)
    """Name -> setting of torch that differs from `TORCH_DEFAULTS`."""


# ---- In the driver --------------------------------------------------------------------------------------------------


def taken(*, is_users: bool) -> Program:
    """Return the state of this process's program.

    Args:
        is_users: True if the program is the user's own. Its command line and `__main__` are left out otherwise.
    """
    loggers = dict(_loggers())
    if not is_users:
        return Program(loggers=loggers, torch=_torch_settings())
    main = sys.modules["__main__"]
    return Program(
        arguments=tuple(sys.argv[1:]),
        module=getattr(getattr(main, "__spec__", None), "name", None),
        package=getattr(main, "__package__", None),
        spare_parts=pickling.spare_parts(MAX_SPARE_PART),
        cells={
            name: "".join(lines)
            for name in _places()
            if not Path(name).exists() and (lines := linecache.getlines(name))
        },
        loggers=loggers,
        torch=_torch_settings(),
    )


def of_script(arguments: Sequence[str], module: str | None) -> Program:
    """Return the state for ranks that run a script or module, with this process's logging and settings of torch."""
    return Program(arguments=arguments, module=module, loggers=dict(_loggers()), torch=_torch_settings())


def _places() -> set[str]:
    """Return the names of the files that define the functions and methods of `__main__`."""
    functions = [value for value in pickling.definitions().values() if isinstance(value, FunctionType)]
    classes = [value for value in pickling.definitions().values() if isinstance(value, type)]
    functions += [value for kind in classes for value in vars(kind).values() if isinstance(value, FunctionType)]
    return {function.__code__.co_filename for function in functions}


def _loggers() -> Iterator[tuple[str, _Logger]]:
    for name, logger in [("", logging.getLogger()), *logging.Logger.manager.loggerDict.copy().items()]:
        if isinstance(logger, logging.Logger):
            handlers = list(_handlers(logger))
            if handlers or logger.level != (logging.NOTSET if name else logging.WARNING) or not logger.propagate:
                yield name, _Logger(level=logger.level, propagate=logger.propagate, handlers=handlers)


def _handlers(logger: logging.Logger) -> Iterator[bytes]:
    for handler in logger.handlers:
        stream = getattr(handler, "stream", None)
        if stream is not None and stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            with contextlib.suppress(Exception):  # a user's own formatter may hold objects of any kind
                yield pickling.dumps((stream, handler.level, handler.formatter))


def _torch_settings() -> dict[str, Any]:
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_default_dtype"):  # not imported, or being imported
        return {}
    found = {
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "deterministic_mode": torch.get_deterministic_debug_mode(),
        "cudnn": (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
    }
    with contextlib.suppress(RuntimeError):  # the program uses torch 2.9's newer settings, which exclude this one
        found["matmul_precision"] = torch.get_float32_matmul_precision()
    return {name: value for name, value in found.items() if value != TORCH_DEFAULTS[name]}


# ---- In a rank ------------------------------------------------------------------------------------------------------


def set_up(program: Program, script: Path | None) -> None:
    """Set this process's `__main__`, command line and logging to the program's, without a run of the script.

    As in processes that `multiprocessing` spawns, `__main__` is also known as `__mp_main__`. Objects from processes
    that this process spawns have that module name.

    Args:
        program: The state of the driver's program.
        script: The script's path on this node. None without a script.
    """
    main = sys.modules["__main__"] = sys.modules["__mp_main__"] = ModuleType("__main__")
    main.__package__ = program.package
    main.__spec__ = ModuleSpec(program.module, None) if program.module else None
    if script is not None:
        main.__file__ = str(script)
    main.__dict__["__getattr__"] = _SpareParts(program.spare_parts)
    sys.argv[:] = [str(script or sys.argv[0]), *(program.arguments or ())]
    for name, text in program.cells.items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    for name, logger in program.loggers.items():
        if "TORCH_LOGS" not in os.environ or name.partition(".")[0] != "torch":  # torch has set the levels in this rank
            _set_up(logging.getLogger(name), logger)
    logging.root.setLevel(logging.root.level)  # clears the loggers' caches of effective levels


def enter_torch(settings: Mapping[str, Any]) -> None:
    """Apply the driver's settings of torch to this rank."""
    import torch

    if (dtype := settings.get("default_dtype")) is not None:
        torch.set_default_dtype(getattr(torch, dtype))
    if (precision := settings.get("matmul_precision")) is not None:
        torch.set_float32_matmul_precision(precision)
    if (mode := settings.get("deterministic_mode")) is not None:
        torch.use_deterministic_algorithms(True, warn_only=mode == 1)  # also torch.compile's
    if (cudnn := settings.get("cudnn")) is not None:
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn


@dataclass(frozen=True)
class _SpareParts:
    """`__getattr__` of a rank's `__main__`: unpickles a class at the first lookup of its name."""

    parts: Mapping[str, bytes]

    def __call__(self, name: str) -> Any:
        if name not in self.parts:
            raise AttributeError(
                f"module '__main__' has no attribute {name!r} in this rank, which does not run the top of the script. "
                "Define it in a module that the script imports"
            )
        return pickling.loads(self.parts[name])


def _set_up(logger: logging.Logger, asked: _Logger) -> None:
    logger.level = asked.level
    logger.propagate = asked.propagate
    for pickled in asked.handlers if not logger.handlers else ():  # libraries set up their loggers in ranks, too
        stream, level, formatter = pickling.loads(pickled)
        made = logging.StreamHandler(stream)
        made.setLevel(level)
        made.setFormatter(formatter)
        logger.addHandler(made)
