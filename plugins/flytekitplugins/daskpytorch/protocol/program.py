"""The user's program besides its sources: `__main__`, command line, logging and settings of torch.

Taken in the driver, had in a rank.
"""

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

import psutil

from flytekitplugins.daskpytorch.protocol import pickling

MAX_SPARE_PART = 256 << 10
"""Bytes of a class of `__main__` that nothing in the call names."""
STREAMS = ("stdout", "stderr")
FIRST_OWN_SEED = 1 << 32
"""Seeds that torch draws for itself have 53 random bits: one in two million is smaller. Users' seeds are smaller."""


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
class TorchSettings:
    """The settings that differ from torch's defaults; None or False for the others."""

    default_dtype: str | None = None
    matmul_precision: str | None = None
    """Precision of float32 products, an argument of `torch.set_float32_matmul_precision`."""
    deterministic: bool = False
    warn_only: bool = False
    cudnn_deterministic: bool = False
    cudnn_benchmark: bool = False
    num_threads: int | None = None
    seed: int | None = None
    """Given to `torch.manual_seed`. Ranks do not take it; see `rank.hints`."""


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


def _torch_settings() -> TorchSettings:
    """Return this process's settings; the defaults if it has not imported torch."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_default_dtype"):  # not imported, or being imported
        return TorchSettings()
    dtype = str(torch.get_default_dtype()).removeprefix("torch.")
    seed = torch.initial_seed()
    return TorchSettings(
        default_dtype=dtype if dtype != "float32" else None,
        matmul_precision=_matmul_precision(torch),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        cudnn_deterministic=torch.backends.cudnn.deterministic,
        cudnn_benchmark=torch.backends.cudnn.benchmark,
        num_threads=_num_threads(torch),
        seed=seed if seed < FIRST_OWN_SEED else None,
    )


def _matmul_precision(torch: Any) -> str | None:
    try:
        precision = str(torch.get_float32_matmul_precision())
    except RuntimeError:  # set by torch 2.9's newer names, which it does not mix with this one
        return None
    return precision if precision != "highest" else None


def _num_threads(torch: Any) -> int | None:
    """Return the number of threads that the program has set; None where torch may have taken it from the machine."""
    defaults = {os.cpu_count(), len(os.sched_getaffinity(0)), psutil.cpu_count(logical=False)}
    from_environment = {os.environ.get(name, "").partition(",")[0] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    number = int(torch.get_num_threads())
    return None if number in defaults or str(number) in from_environment else number


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


def enter_torch(settings: TorchSettings) -> None:
    """Have this rank's torch set as the driver's was."""
    import torch

    if settings.default_dtype is not None:
        torch.set_default_dtype(getattr(torch, settings.default_dtype))
    if settings.matmul_precision is not None:
        torch.set_float32_matmul_precision(settings.matmul_precision)
    if settings.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=settings.warn_only)
    if settings.cudnn_deterministic:
        torch.backends.cudnn.deterministic = True
    if settings.cudnn_benchmark:
        torch.backends.cudnn.benchmark = True
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)


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
