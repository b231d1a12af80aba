"""The records of a rank's end: filled in by the rank and its agent, read by the driver."""

from __future__ import annotations

import builtins
import pickle
import re
import signal
import sysconfig
import traceback
from bdb import BdbQuit
from collections.abc import Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass

import cloudpickle
from tblib import pickling_support

from flytekitplugins.daskpytorch.errors import NoDebuggerError
from flytekitplugins.daskpytorch.protocol.collectives import Recalled

MAX_TEXT = 32 << 10
"""Characters of an exception's message, and of its traceback."""
MAX_PICKLED = 1 << 20
"""Bytes of an exception that travels as it is; of a larger one, which may hold a batch, the text does."""
CONSEQUENCES = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket (closed|timeout)|gloo|nccl"
    r"|remote process|store->|tcpstore|timed out (after|waiting)",
    re.IGNORECASE,
)
"""What torch, gloo and NCCL say in a rank whose peer has gone."""
CERTAIN_TYPES = (ImportError, NameError, SyntaxError, NoDebuggerError, BdbQuit)
"""Of errors that the same code runs into again, however it got there; the last is what `q` in a debugger raises."""
SIGNALS_TO_CALLERS = (StopIteration, StopAsyncIteration, CancelledError, BdbQuit)
"""Exceptions by which a loop, an event loop or a debugger ends without an error, wherever they are raised."""
# The texts of GPUs' errors are those of CUDA 13's runtime, of NCCL 2.28 and of torch 2.6 to 2.15.
GPU_FAULT = re.compile(
    r"uncorrectable (ECC|NVLink) error|over nvlink or a hardware error|is/are busy or unavailable"
    r"|(CUDA error: |Error 802: |Cuda failure (802 )?')system not yet initialized"
    r"|GPU is lost|fallen off the bus|\bXid\b.{0,40}\b79\b"
    r"|nvml\w+\([^)]*\) failed|(Failed to|Can't) initialize NVML|NVML_SUCCESS == (?!.*CachingAllocator)",
    re.IGNORECASE,
)
"""A GPU, its links, its fabric or its driver has failed, whatever the code does.

Left out are errors that code may cause, too: "unspecified launch failure", "hardware stack error" and "initialization
error". Torch's allocator asks NVML only where memory is short, so its failed question is left out as well.
"""
NCCL_MEMORY = re.compile(
    r"Cuda failure (\d+ )?'out of memory'|Failed to CUDA (malloc|calloc|host alloc)", re.IGNORECASE
)
"""NCCL has found too little memory on the rank's own GPU. Its error has the type that a lost peer has, too."""
CONSEQUENCE_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError")
GROUP_FILES = re.compile(
    r"/(torch/(distributed|nn/parallel|autograd)|flytekitplugins/daskpytorch/(rank|protocol|node))/"
)
"""Source files whose network errors come from the process group, or from the rank's agent."""
STANDARD = ("<frozen", sysconfig.get_path("stdlib"))
"""Starts of file names of Python's standard library."""
WATCHDOG = re.compile(
    r"atchdog (caught collective operation timeout|got stuck|thread terminated with exception: (?!.*(?i:CUDA error)))"
    r"|Aborting process on rank .*due to (timeout|error - nccl)"
)
"""Log lines by which torch's NCCL backends (2.6 to 2.15, both of 2.15) say why they abort the process.

A CUDA error is left out: the watchdog is only the first thread to see an error of the rank's own kernels.
"""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An exception as its rank saw it."""

    type_name: str
    message: str
    traceback: str
    """As Python prints it."""
    pickled: bytes | None
    """The exception itself, where pickling it forth and back works."""
    time: float
    """Seconds since the epoch when it reached the top of the rank."""
    is_consequence: bool
    """It reads like the loss of a peer."""
    position: tuple[int | None, int | None] = (None, None)
    """Where the rank was: the newest step that it had named, and its signs of life since then."""
    place: str = ""
    """File and line that raised it."""
    is_final: bool = False
    """It is certain to come again: the function had returned something of no use, or the code itself is wrong."""
    recalled: Recalled | None = None
    """The rank's last collectives, where it reads like the loss of a peer."""
    gpu_fault: str = ""
    """Line of the exception's text by which a GPU has failed; empty for other exceptions."""

    @classmethod
    def of(
        cls,
        error: BaseException,
        time: float,
        position: tuple[int | None, int | None] = (None, None),
        *,
        is_final: bool = False,
    ) -> Failure:
        """Record an exception, in the rank that raised it."""
        name = type(error).__name__
        text = _shortened(_text_of(error))
        # The first frame is the rank's own call of the function.
        trace = error.__traceback__.tb_next if error.__traceback__ else None
        shown = "".join(traceback.format_exception(type(error), error, trace))
        gpu_fault = next(filter(None, map(_gpu_fault_of, _with_causes(error))), "")
        return cls(
            type_name=name,
            message=text,
            traceback=_shortened(shown),
            place=_place_of(error),
            pickled=_pickled(error),
            time=time,
            is_consequence=not gpu_fault and any(map(_is_of_group, _with_causes(error))),
            gpu_fault=gpu_fault,
            position=position,
            is_final=is_final or isinstance(error, CERTAIN_TYPES),
        )

    def rebuilt(self) -> Exception | None:
        """The exception in its own type: unpickled, or of a builtin type with the same text; None where neither can be.

        Exceptions that would end the driver (`SystemExit`, `KeyboardInterrupt`) are not rebuilt. One that ends its
        catcher's loop without an error (`StopIteration`) is made a `RuntimeError`.
        """
        error: object = None
        if self.pickled is not None:
            try:
                error = cloudpickle.loads(self.pickled)  # from our own rank, by its agent's connection
            except BaseException:  # extensions written in Rust raise their own on wrong data
                error = None
        if error is None:
            kind = getattr(builtins, self.type_name, None)
            if isinstance(kind, type) and issubclass(kind, Exception):
                try:
                    error = kind(self.message)
                except TypeError:  # UnicodeDecodeError and its like
                    error = None
        return raisable(error, "a rank's function") if isinstance(error, Exception) else None


@dataclass(frozen=True, kw_only=True)
class RankExit:
    """The end of one rank, or of the worker under it."""

    rank: int
    worker: str
    host: str
    exitcode: int | None
    """As `os.waitstatus_to_exitcode` has it; None: the worker went, and took the rank along."""
    failure: Failure | None
    """The exception it reported."""
    log_tail: str
    time: float
    """Seconds since the epoch, where the exit was seen."""
    out_of_memory: bool = False
    """The container's out-of-memory killer was at work on its host."""
    stopped: bool = False
    """We ended it, after another rank's failure."""
    hang: str | None = None
    """It held up the others: for how long, why it is thought to, and the stacks of all ranks."""
    is_deadlock: bool = False
    """The hang is proven to come again in each attempt."""
    difference: str | None = None
    """What differs in the collectives of the ranks, one of which may have failed for that."""
    step: int | None = None
    """The newest step that it had named."""
    agent_traceback: str | None = None
    """The agent that watched it failed, like this."""
    watchdog: str = ""
    """Log line by which torch's NCCL watchdog said why it aborted the rank; empty for any other end."""
    gpu: str = ""
    """The rank's own GPU, as messages name it; empty for a rank without one."""

    @property
    def position(self) -> tuple[int | None, int | None]:
        """Where it was: the newest step that it had named and, where it could still say, its signs of life since."""
        return self.failure.position if self.failure is not None else (self.step, None)

    @property
    def gpu_fault(self) -> str:
        """Line by which the rank's GPU has failed, of its exception or its abort; empty for any other end.

        Torch's NCCL watchdog is often the first to see such an error, and aborts the rank from its own thread.
        """
        if not self.gpu or self.hang is not None:
            return ""
        if self.failure is not None:
            return self.failure.gpu_fault
        return _find_gpu_fault(self.log_tail) if self.exitcode == -signal.SIGABRT and not self.stopped else ""

    @property
    def is_consequence(self) -> bool:
        """It may well have ended because another rank did."""
        if self.hang is not None or self.gpu_fault:
            return False
        return self.stopped or bool(self.watchdog) if self.failure is None else self.failure.is_consequence

    @property
    def may_be_of_collective(self) -> bool:
        """Its collective may have failed: torch raises then, and NCCL's watchdog, as gloo in its threads, aborts."""
        if self.hang is not None or self.stopped or self.gpu_fault:
            return False
        return self.failure.is_consequence if self.failure is not None else self.exitcode == -signal.SIGABRT

    @property
    def is_infrastructure(self) -> bool:
        """Taken away from outside: with its worker or GPU, or by a signal that code seldom sends itself."""
        if self.gpu_fault:
            return True
        if self.failure is not None or self.hang is not None or self.out_of_memory:
            return False
        if self.watchdog:  # ranks that call different collectives are an error of the code
            return self.difference is None
        return self.exitcode in (None, -signal.SIGKILL, -signal.SIGTERM)


def describe_exit(error: SystemExit) -> str:
    """Return how Python ends for such an argument of `sys.exit`."""
    code = error.code or 0
    return f"exit code {int(code)}" if isinstance(code, int) else f"exit code 1 ({code})"


def raisable(error: BaseException, raiser: str) -> Exception:
    """Return what a future may raise for an error: a `RuntimeError` from any that ends its catcher without an error.

    Python does the same for a `StopIteration` that leaves a generator or a coroutine (PEP 479). Otherwise
    `list(map(future.result, ...))` would end early in silence, and a future that waits for `asyncio` would never end.

    Args:
        error: Any error.
        raiser: Who has raised the error, for the message.
    """
    if isinstance(error, Exception) and not isinstance(error, SIGNALS_TO_CALLERS):
        return error
    name, text = type(error).__name__, _text_of(error)
    instead = RuntimeError(f"{raiser} raised {name}: {text}" if text else f"{raiser} raised {name}")
    instead.__cause__ = error
    return instead.with_traceback(error.__traceback__)


def is_of_watchdog(line: str) -> bool:
    """Return True if torch's NCCL watchdog says in this log line that it aborts the process."""
    return ("atchdog " in line or "Aborting process" in line) and WATCHDOG.search(line) is not None


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, and those that it was explicitly raised from."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__


def _is_of_group(error: BaseException) -> bool:
    """Return True if an exception reads like the loss of a peer, and comes from the process group.

    Torch raises its own types, or a `RuntimeError`, whose text tells. An `OSError` may come from any socket: the calls
    that led to it tell whose.
    """
    if _is_memory_of_nccl(_text_of(error)):
        return False
    if type(error).__name__ in CONSEQUENCE_TYPES:
        return True
    says_so = CONSEQUENCES.search(_text_of(error)) is not None
    if isinstance(error, OSError):
        return (says_so or isinstance(error, ConnectionError)) and GROUP_FILES.search(_caller_of(error)) is not None
    return says_so and isinstance(error, RuntimeError) and not isinstance(error.__cause__, OSError)


def _gpu_fault_of(error: BaseException) -> str:
    """Return the line by which a GPU has failed. Torch raises a `RuntimeError`, nvidia-ml-py a class of its own."""
    is_of_gpu = isinstance(error, RuntimeError) or type(error).__name__.startswith("NVMLError")
    return _find_gpu_fault(_text_of(error)) if is_of_gpu else ""


def _caller_of(error: BaseException) -> str:
    """Return the file of the innermost frame outside Python's standard library, or ""."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((file for file in reversed(files) if "-packages/" in file or not file.startswith(STANDARD)), "")


def _shortened(text: str) -> str:
    """At most `MAX_TEXT` characters of it, from both ends, and a word about the rest."""
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"


def _place_of(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _text_of(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return describe_exit(error)
    try:
        return str(error)
    except BaseException:  # of a user's own class
        return "<exception str() failed>"


def _pickled(error: BaseException) -> bytes | None:
    try:
        pickling_support.install(error)  # with its traceback and causes, and whatever its __init__ asks for
        data = cloudpickle.dumps(error)
        if type(pickle.loads(data)) is not type(error):  # noqa: S301 - made two lines above
            return None
    except BaseException:  # of a user's own class
        return None
    return bytes(data) if len(data) <= MAX_PICKLED else None


def _find_gpu_fault(text: str) -> str:
    """Return the line in which an error's text, or a log, says that a GPU has failed; "" without one."""
    return next((line.strip() for line in text.splitlines() if GPU_FAULT.search(line)), "")


def _is_memory_of_nccl(text: str) -> bool:
    """Return True if an error's text says that NCCL has found too little memory."""
    return NCCL_MEMORY.search(text) is not None
