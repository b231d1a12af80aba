"""The user's program besides its sources: `__main__`, command line and logging; taken in the driver, had in a rank."""

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

from flytekitplugins.daskpytorch.protocol import pickling, torch_settings
from flytekitplugins.daskpytorch.protocol.torch_settings import TorchSettings

MAX_SPARE_PART = 256 << 10
"""Bytes of a class of `__main__` that nothing in the call names."""
STREAMS = ("stdout", "stderr")


@dataclass(frozen=True, kw_only=True)
class _Handler:
    """A handler that writes to a standard stream."""

    stream: str
    level: int
    formatter: bytes | None
    """Pickled; None: logging's own."""


@dataclass(frozen=True, kw_only=True)
class _Logger:
    level: int
    propagate: bool
    handlers: Sequence[_Handler]


@dataclass(frozen=True, kw_only=True)
class Program:
    """What ranks have of the driver's program. Holds the user's objects only as bytes."""

    arguments: Sequence[str] | None = field(default=None, repr=False)
    """Its command line without the first word; None: it is none of the user's, but pyflyte, say."""
    module: str | None = None
    """The name that `python -m` had."""
    package: str | None = None
    spare_parts: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """Classes of `__main__` that may be asked for by name only, each pickled."""
    cells: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What has no file, as a notebook's cells: its name -> its text."""
    loggers: Mapping[str, _Logger] = field(default_factory=dict)
    """Those that somebody has set up; the root's name is empty."""
    torch: TorchSettings = field(default_factory=TorchSettings)


# ---- In the driver --------------------------------------------------------------------------------------------------


def taken(*, is_users: bool) -> Program:
    """This process's; `is_users`: it is the user's own, so that its command line and `__main__` count."""
    loggers = dict(_loggers())
    if not is_users:
        return Program(loggers=loggers, torch=torch_settings.taken())
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
        torch=torch_settings.taken(),
    )


def _places() -> set[str]:
    """Where the definitions of `__main__` say that they stand."""
    functions = [value for value in pickling.definitions().values() if isinstance(value, FunctionType)]
    classes = [value for value in pickling.definitions().values() if isinstance(value, type)]
    functions += [value for kind in classes for value in vars(kind).values() if isinstance(value, FunctionType)]
    return {function.__code__.co_filename for function in functions}


def _loggers() -> Iterator[tuple[str, _Logger]]:
    pickled: dict[int, bytes | None] = {}  # Dask's loggers share one formatter
    for name, logger in [("", logging.getLogger()), *logging.Logger.manager.loggerDict.copy().items()]:
        if isinstance(logger, logging.Logger):
            handlers = list(_handlers(logger, pickled))
            if handlers or logger.level != (logging.NOTSET if name else logging.WARNING) or not logger.propagate:
                yield name, _Logger(level=logger.level, propagate=logger.propagate, handlers=handlers)


def _handlers(logger: logging.Logger, pickled: dict[int, bytes | None]) -> Iterator[_Handler]:
    for handler in logger.handlers:
        stream, formatter = getattr(handler, "stream", None), handler.formatter
        for name in STREAMS:
            if stream is not None and stream in (getattr(sys, name), getattr(sys, f"__{name}__")):
                if id(formatter) not in pickled:
                    pickled[id(formatter)] = _pickled(formatter)
                yield _Handler(stream=name, level=handler.level, formatter=pickled[id(formatter)])
                break


def _pickled(formatter: logging.Formatter | None) -> bytes | None:
    try:
        return None if formatter is None else pickling.dumps(formatter)
    except Exception:  # one of the user's own, that holds who knows what
        return None


# ---- In a rank ------------------------------------------------------------------------------------------------------


def enter(program: Program, script: Path | None) -> None:
    """Have this process's `__main__`, command line and logging be the program's, whose script lies there.

    Nothing of the script is run. As in processes that `multiprocessing` spawns, `__main__` has another name too, by
    which objects come out of those that this one spawns.
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
        _set_up(logging.getLogger(name), logger)
    if os.getppid() != _forgotten_by:
        forget_levels()


def forget_levels() -> None:
    """Have all loggers forget what they know of each other's levels.

    Once for all processes that this one forks from now on: each would copy a page of memory for every logger.
    """
    global _forgotten_by
    logging.root.setLevel(logging.root.level)
    _forgotten_by = os.getpid()


@dataclass(frozen=True)
class _SpareParts:
    """`__main__`'s own `__getattr__`: makes what is asked for when it is asked for."""

    parts: Mapping[str, bytes]

    def __call__(self, name: str) -> Any:
        if name not in self.parts:
            raise AttributeError(f"module '__main__' has no attribute {name!r} in this rank")
        return pickling.loads(self.parts[name])


def _set_up(logger: logging.Logger, asked: _Logger) -> None:
    logger.level = asked.level
    logger.propagate = asked.propagate
    if logger.handlers:  # a library's, which it has set up here as it did there
        return
    for handler in asked.handlers:
        made = logging.StreamHandler(getattr(sys, handler.stream))
        made.setLevel(handler.level)
        if handler.formatter is not None:
            made.setFormatter(pickling.loads(handler.formatter))
        logger.addHandler(made)


_forgotten_by: int | None = None
"""The process whose loggers know nothing of each other."""
