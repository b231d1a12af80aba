"""State of the user's program: `__main__`, command line, logging and settings of torch.

The driver reads the state, and each rank applies the state to itself.
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
"""Maximum number of bytes of a pickled class of `__main__` that ranks get apart from the call. Larger classes are left
out."""
STREAMS = ("stdout", "stderr")


@dataclass(frozen=True, kw_only=True)
class _Handler:
    """Settings of a logging handler that writes to a standard stream."""

    stream: str
    level: int
    formatter: bytes | None
    """Pickled formatter. None means logging's default formatter."""


@dataclass(frozen=True, kw_only=True)
class _Logger:
    level: int
    propagate: bool
    handlers: Sequence[_Handler]


@dataclass(frozen=True, kw_only=True)
class TorchSettings:
    """Settings of torch that differ from its defaults. Defaults appear as None or False."""

    default_dtype: str | None = None
    matmul_precision: str | None = None
    """Argument of `torch.set_float32_matmul_precision`. None leaves torch's default."""
    deterministic_mode: int = 0
    """Result of `torch.get_deterministic_debug_mode`: 0 allows all algorithms, 1 warns of others, 2 raises."""
    cudnn_deterministic: bool = False
    cudnn_benchmark: bool = False
    num_threads: int | None = None


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
    torch: TorchSettings = field(default_factory=TorchSettings)


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


def _handlers(logger: logging.Logger) -> Iterator[_Handler]:
    for handler in logger.handlers:
        stream = getattr(handler, "stream", None)
        for name in STREAMS:
            if stream is not None and stream in (getattr(sys, name), getattr(sys, f"__{name}__")):
                yield _Handler(stream=name, level=handler.level, formatter=_pickled(handler.formatter))
                break


def _pickled(formatter: logging.Formatter | None) -> bytes | None:
    try:
        return None if formatter is None else pickling.dumps(formatter)
    except Exception:  # a user's own formatter may hold objects of any kind
        return None


def _torch_settings() -> TorchSettings:
    """Return torch's settings in this process. Return the defaults if this process has not imported torch."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_default_dtype"):  # not imported, or being imported
        return TorchSettings()
    dtype = str(torch.get_default_dtype()).removeprefix("torch.")
    return TorchSettings(
        default_dtype=dtype if dtype != "float32" else None,
        matmul_precision=_matmul_precision(torch),
        deterministic_mode=torch.get_deterministic_debug_mode(),
        cudnn_deterministic=torch.backends.cudnn.deterministic,
        cudnn_benchmark=torch.backends.cudnn.benchmark,
        num_threads=_num_threads(torch),
    )


def _matmul_precision(torch: Any) -> str | None:
    try:
        precision = str(torch.get_float32_matmul_precision())
    except RuntimeError:  # the program uses torch 2.9's newer settings, which exclude this one
        return None
    return precision if precision != "highest" else None


def _num_threads(torch: Any) -> int | None:
    """Return torch's number of threads, as the program has set. None if the number may be torch's default."""
    defaults = {os.cpu_count(), len(os.sched_getaffinity(0)), psutil.cpu_count(logical=False)}
    from_environment = {os.environ.get(name, "").partition(",")[0] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    number = int(torch.get_num_threads())
    return None if number in defaults or str(number) in from_environment else number


# ---- In a rank ------------------------------------------------------------------------------------------------------


def enter(program: Program, script: Path | None) -> None:
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


def enter_torch(settings: TorchSettings) -> None:
    """Apply the driver's settings of torch to this rank."""
    import torch

    if settings.default_dtype is not None:
        torch.set_default_dtype(getattr(torch, settings.default_dtype))
    if settings.matmul_precision is not None:
        torch.set_float32_matmul_precision(settings.matmul_precision)
    if settings.deterministic_mode:
        torch.use_deterministic_algorithms(True, warn_only=settings.deterministic_mode == 1)  # also torch.compile's
    if settings.cudnn_deterministic:
        torch.backends.cudnn.deterministic = True
    if settings.cudnn_benchmark:
        torch.backends.cudnn.benchmark = True
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)


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
    if logger.handlers:  # libraries set up their loggers in ranks, as in the driver
        return
    for handler in asked.handlers:
        made = logging.StreamHandler(getattr(sys, handler.stream))
        made.setLevel(handler.level)
        if handler.formatter is not None:
            made.setFormatter(pickling.loads(handler.formatter))
        logger.addHandler(made)
