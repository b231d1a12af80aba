"""Records of a rank's end and of its last collectives, by which the driver finds the cause of a failure or hang.

Written by the rank and its agent.
"""

from __future__ import annotations

import contextlib
import pickle
import re
import signal
import sysconfig
import time
import traceback
from bdb import BdbQuit
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from types import TracebackType

from flytekitplugins.daskpytorch.errors import NoDebuggerError
from flytekitplugins.daskpytorch.protocol import pickling
from flytekitplugins.daskpytorch.protocol.script import describe_exit, exit_code_of

MAX_TEXT = 32 << 10
MAX_PICKLED = 1 << 20
"""Bytes of a pickled exception, of which a larger one may hold a batch, and reaches the driver as text only."""
DEFAULT_GROUP = "the default group"
CONSEQUENCES = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket (closed|timeout)|gloo|nccl"
    r"|remote process|store->|tcpstore|timed out (after|waiting)",
    re.IGNORECASE,
)
"""Texts of errors that torch, gloo and NCCL raise in a rank whose peer has ended."""
CERTAIN_TYPES = (ImportError, NameError, SyntaxError, NoDebuggerError, BdbQuit)
"""Errors that the same code raises again in each attempt, such as `BdbQuit` by `q` in a debugger."""
SIGNALS_TO_CALLERS = (StopIteration, StopAsyncIteration, CancelledError, BdbQuit)
"""Exceptions that end a loop, an event loop or a debugger without an error."""
MEMORY_TYPES = ("MemoryError", "OutOfMemoryError")
MEMORY_TEXTS = re.compile(
    r"Cuda failure (\d+ )?'out of memory'|Failed to CUDA (malloc|calloc|host alloc)|CUDA error: out of memory"
    r"|DefaultCPUAllocator: (can't allocate|not enough) memory",
    re.IGNORECASE,
)
"""Texts of NCCL, CUDA and torch's CPU allocator when memory is short. NCCL's error type is that of a lost peer."""
CONSEQUENCE_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError")
GROUP_FILES = re.compile(
    r"/(torch/(distributed|nn/parallel|autograd)|flytekitplugins/daskpytorch/(rank|protocol|node))/"
)
"""Source files whose network errors come from the process group, or from the rank's agent."""
STANDARD = ("<frozen", sysconfig.get_path("stdlib"))
WATCHDOG = re.compile(
    r"atchdog (caught collective operation timeout|got stuck|thread terminated with exception: (?!.*(?i:CUDA error)))"
    r"|Aborting process on rank .*due to (timeout|error - nccl)"
)
"""Log lines in which torch's NCCL watchdog tells why it aborts the process (torch 2.6 to 2.15, both NCCL backends of
2.15). CUDA errors do not match: the rank's kernels cause them.
"""
OURS = "flytekitplugins/daskpytorch/"
NOT_THE_USERS = re.compile(
    r'(File ")?(<(frozen |c?attrs generated |@beartype\(|sqlalchemy generated |decorator-gen-|makefun-gen-|'
    r"lambdifygenerated-|__array_function__ internals>|eval_with_key>|string>|template>|unknown>)"
    r"|.*(/(site|dist)-packages/|/lib(64)?/python3\.\d+t?/|/flyte(kit)?plugins/daskpytorch/))"
)
"""Matches files, and `faulthandler`'s frames, of Python, installed packages, this package and generated code. Other
names in angle brackets are the user's: `<stdin>`, or a notebook's cell.
"""
MAX_COLLECTIVES = 32
"""Newest collectives in a rank's report. Ranks block within a few collectives after a mismatch."""

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Collective:
    group: str
    number: int
    """From 1 in the group, equal in ranks that run the same code."""
    operation: str
    inputs: Sequence[Shape]
    outputs: Sequence[Shape]
    dtypes: Sequence[str]
    """Dtypes of the inputs, or of the outputs without inputs."""
    is_done: bool
    frames: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Recalled:
    groups: Mapping[str, int]
    """Number of the rank's newest collective by group, or 0 before the first. Without groups of unknown number."""
    collectives: Sequence[Collective]
    is_over: bool = False
    """The rank's program has ended: the rank calls no other collective."""

    @property
    def newest_of_all(self) -> int:
        """Return the number of the newest collective of all ranks, of which each backend counts its own."""
        return sum(number for group, number in self.groups.items() if group.startswith(DEFAULT_GROUP))


@dataclass(frozen=True, kw_only=True)
class Failure:
    type_name: str
    message: str
    traceback: str
    """Empty for a GPU that has not passed its check."""
    pickled: bytes | None
    time: float
    is_consequence: bool
    position: tuple[int | None, int | None] = (None, None)
    """Newest logged or saved step, and number of signs of life since then, where known."""
    place: str = ""
    is_final: bool = False
    """Every attempt would fail in the same way: the code is wrong, or the driver cannot get the return value."""
    recalled: Recalled | None = None
    gpu_fault: str = ""
    exit_code: int = 1
    is_of_memory: bool = False

    @classmethod
    def of(
        cls,
        error: BaseException,
        time: float,
        position: tuple[int | None, int | None] = (None, None),
        *,
        is_final: bool = False,
    ) -> Failure:
        name = type(error).__name__
        text = _shortened(_text_of(error))
        trace = error.__traceback__.tb_next if error.__traceback__ else None
        lines = traceback.format_exception(type(error), error, without_ours(trace) or trace)
        shown = "" if isinstance(error, GpuFaultError) and error.__cause__ is None else "".join(lines)
        gpu_fault = next(filter(None, map(fault_of, with_causes(error))), "")
        return cls(
            type_name=name,
            message=text,
            traceback=_shortened(shown),
            place=_place_of(error),
            pickled=_pickled(error),
            time=time,
            is_consequence=not gpu_fault and any(map(is_of_group, with_causes(error))),
            gpu_fault=gpu_fault,
            position=position,
            exit_code=exit_code_of(error),
            is_of_memory=any(map(_is_of_memory, with_causes(error))),
            is_final=is_final or isinstance(error, CERTAIN_TYPES),
        )

    def rebuilt(self) -> Exception | None:
        """Return the exception in its own type, or None if its pickle cannot be made or opened.

        An exception that would end the driver (`SystemExit`) gives None, and a `StopIteration` becomes a
        `RuntimeError`.
        """
        error: object = None
        if self.pickled is not None:
            with contextlib.suppress(BaseException):  # extensions in Rust raise exceptions of their own on wrong data
                error = pickle.loads(self.pickled)  # noqa: S301 - from the gang's own rank, over its agent's connection
        return raisable(error, "a rank's function") if isinstance(error, Exception) else None


@dataclass(frozen=True, kw_only=True)
class RankExit:
    """The agent reports a rank's end. The driver adds the rank's place, failure, hang and step."""

    rank: int
    worker: str = ""
    host: str = ""
    exitcode: int | None
    """From `os.waitstatus_to_exitcode`, or None if the worker was lost, too."""
    failure: Failure | None = None
    log_tail: str = ""
    time: float = field(default_factory=time.time)
    """Seconds since the epoch, on the clock of the agent or driver."""
    out_of_memory: bool = False
    stopped: bool = False
    hang: str | None = None
    left_by: str = ""
    """Sentence that says which ranks had returned while this rank waited for them."""
    difference: str | None = None
    step: int | None = None
    agent_traceback: str | None = None
    watchdog: str = ""
    gpu: str = ""

    @property
    def position(self) -> tuple[int | None, int | None]:
        return self.failure.position if self.failure is not None else (self.step, None)

    @property
    def gpu_fault(self) -> str:
        """Torch's NCCL watchdog is often the first thread to see a failed GPU, and aborts the rank."""
        if not self.gpu or self.hang is not None:
            return ""
        if self.failure is not None:
            return self.failure.gpu_fault
        return fault_in(self.log_tail) if self.exitcode == -signal.SIGABRT and not self.stopped else ""

    @property
    def own_exit_code(self) -> int | None:
        """None if the worker was lost, or the gang ended the rank."""
        if self.failure is not None:
            return self.failure.exit_code
        return None if self.stopped or self.hang is not None else self.exitcode

    @property
    def is_consequence(self) -> bool:
        if self.hang is not None or self.gpu_fault:
            return False
        return self.stopped or bool(self.watchdog) if self.failure is None else self.failure.is_consequence

    @property
    def may_be_of_collective(self) -> bool:
        """Torch raises an exception for a failed collective. NCCL's watchdog and gloo's threads abort the rank."""
        if self.hang is not None or self.stopped or self.gpu_fault:
            return False
        return self.failure.is_consequence if self.failure is not None else self.exitcode == -signal.SIGABRT

    @property
    def is_infrastructure(self) -> bool:
        """The rank ended from outside: with its worker or GPU, or by a signal that code seldom sends itself."""
        if self.gpu_fault:
            return True
        if self.failure is not None or self.hang is not None or self.out_of_memory:
            return False
        if self.watchdog:  # ranks that call different collectives are an error of the code
            return self.difference is None
        return self.exitcode in (None, -signal.SIGKILL, -signal.SIGTERM)


def raisable(error: BaseException, raiser: str) -> Exception:
    """Return the error, or a `RuntimeError` by `raiser` in place of one that must not leave a future.

    After a `StopIteration`, `list(map(future.result, ...))` would end early in silence, and a future awaited by
    `asyncio` would never end.
    """
    if isinstance(error, Exception) and not isinstance(error, SIGNALS_TO_CALLERS):
        return error
    name, text = type(error).__name__, _text_of(error)
    instead = RuntimeError(f"{raiser} raised {name}: {text}" if text else f"{raiser} raised {name}")
    instead.__cause__ = error
    return instead.with_traceback(error.__traceback__)


def is_of_watchdog(line: str) -> bool:
    return ("atchdog " in line or "Aborting process" in line) and WATCHDOG.search(line) is not None


def with_causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__


def is_of_group(error: BaseException) -> bool:
    """Return True if an exception reads like the loss of a peer, and comes from the process group.

    Any socket may raise an `OSError`, so the source file that made the call decides.
    """
    if _is_of_memory(error):
        return False
    if type(error).__name__ in CONSEQUENCE_TYPES:
        return True
    says_so = CONSEQUENCES.search(_text_of(error)) is not None
    if isinstance(error, OSError):
        return (says_so or isinstance(error, ConnectionError)) and GROUP_FILES.search(_caller_of(error)) is not None
    return says_so and isinstance(error, RuntimeError) and not isinstance(error.__cause__, OSError)


def _caller_of(error: BaseException) -> str:
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((file for file in reversed(files) if "-packages/" in file or not file.startswith(STANDARD)), "")


def _shortened(text: str) -> str:
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"


def without_ours(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and OURS in trace.tb_frame.f_code.co_filename:
        trace = trace.tb_next
    return trace


def _place_of(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _text_of(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return describe_exit(error)
    try:
        return str(error)
    except BaseException:  # a user's own class may raise any exception
        return "<exception str() failed>"


def _pickled(error: BaseException) -> bytes | None:
    try:
        data = pickling.dumps_by_value(error)
        if type(pickle.loads(data)) is not type(error):  # noqa: S301 - made two lines above
            return None
    except BaseException:  # a user's own class may raise any exception
        return None
    return data if len(data) <= MAX_PICKLED else None


def _is_of_memory(error: BaseException) -> bool:
    return type(error).__name__ in MEMORY_TYPES or MEMORY_TEXTS.search(_text_of(error)) is not None


# ---- Failed GPUs


# The texts of GPUs' errors are those of CUDA 13's runtime, of NCCL 2.28 and of torch 2.6 to 2.15.
GPU_FAULT = re.compile(
    r"uncorrectable (ECC|NVLink) error|over nvlink or a hardware error|is/are busy or unavailable"
    r"|(CUDA error: |Error 802: |Cuda failure (802 )?')system not yet initialized"
    r"|GPU is lost|fallen off the bus|\bXid\b.{0,40}\b79\b"
    r"|nvml\w+\([^)]*\) failed|(Failed to|Can't) initialize NVML|NVML_SUCCESS == (?!.*CachingAllocator)",
    re.IGNORECASE,
)
"""Texts of errors that only a failed GPU, NVLink connection, GPU fabric or GPU driver causes. Left out are errors that
code may cause, too: "unspecified launch failure", "hardware stack error" and "initialization error". Torch's allocator
queries NVML only if memory is short, so its failed query is left out as well."""


class GpuFaultError(RuntimeError):
    """A rank's GPU did not pass its check before use, for the reason in the one-line text."""


def fault_of(error: BaseException) -> str:
    if isinstance(error, GpuFaultError):
        return str(error)
    is_of_gpu = isinstance(error, RuntimeError) or type(error).__name__.startswith("NVMLError")
    return fault_in(_text_of(error)) if is_of_gpu else ""


def fault_in(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if GPU_FAULT.search(line)), "")
