"""Which rank really failed: the records of a gang's end, and the rules that find the cause among the consequences.

Pure, so that the rules can be tested case by case; the driver applies them, ranks and agents fill in the records.
"""

from __future__ import annotations

import builtins
import functools
import pickle
import re
import signal
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import cloudpickle
from tblib import pickling_support

__all__ = [
    "Failure",
    "GangError",
    "GangHungError",
    "GangStartError",
    "PreemptedError",
    "RankExit",
    "StoppedEarlyError",
    "WorkerLostError",
    "describe",
    "find_culprit",
    "verdict",
]

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
CONSEQUENCE_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError")


class GangError(RuntimeError):
    """A gang failed: who, where and why.

    Where the failing rank raised an exception that can be rebuilt, the driver raises that exception, and this one is
    its `__cause__`.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        worker: str | None = None,
        host: str | None = None,
        cause: str | None = None,
        step: int | None = None,
        time: float | None = None,
        rank_traceback: str = "",
        log_tail: str = "",
    ) -> None:
        super().__init__(message)
        self.rank = rank
        """The rank that failed first in earnest; None where no rank did."""
        self.worker = worker
        """The address of its Dask worker, or the name of its node."""
        self.host = host
        """The name of its host."""
        self.cause = cause
        """How it ended, in a line."""
        self.step = step
        """The newest step that it had named, to `log` or to a checkpoint."""
        self.time = time
        """When it failed, in seconds since the epoch."""
        self.rank_traceback = rank_traceback
        """The traceback of the exception it raised, or an empty string."""
        self.log_tail = log_tail
        """The last lines that it wrote; its whole log stands in the task's own log, marked with its rank."""

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.args[0], {k: v for k, v in vars(self).items() if k != "__notes__"}))


class WorkerLostError(GangError):
    """A worker, the scheduler or a rank's process was taken away: the infrastructure failed, not the user's code."""


class PreemptedError(WorkerLostError):
    """The task, or one of its workers, was told to end; the next attempt goes on from the newest checkpoint."""


class GangHungError(GangError):
    """A rank stood still for longer than `hang_timeout`; the message has the stacks of all ranks."""


class GangStartError(GangError):
    """The gang could not be formed: workers or ranks did not come in time."""


class StoppedEarlyError(Exception):
    """A model of `dispatch.map` was not trained to its end, because others were better: nothing has failed."""

    def __init__(self, message: str, *, epoch: int, metric: str, value: float) -> None:
        super().__init__(message)
        self.epoch = epoch
        """The last epoch that counted."""
        self.metric = metric
        """The name of what was compared."""
        self.value = value
        """Its value after that epoch."""

    def __reduce__(self) -> tuple[object, ...]:
        rebuild = functools.partial(type(self), epoch=self.epoch, metric=self.metric, value=self.value)
        return (rebuild, (self.args[0],))


def _rebuild(cls: type[GangError], message: str, fields: dict[str, object]) -> GangError:
    error = cls(message)
    vars(error).update(fields)
    return error


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
    is_final: bool = False
    """It would come again: the function had returned, and what it returned is of no use."""

    @classmethod
    def of(
        cls,
        error: BaseException,
        time: float,
        sources: str = "",
        position: tuple[int | None, int | None] = (None, None),
        *,
        is_final: bool = False,
    ) -> Failure:
        """Record an exception, in the rank that raised it; paths below `sources` are shown relative to it."""
        name = type(error).__name__
        text = _shortened(_text_of(error))
        # The first frame is the rank's own call of the function.
        trace = error.__traceback__.tb_next if error.__traceback__ else None
        shown = "".join(traceback.format_exception(type(error), error, trace))
        return cls(
            type_name=name,
            message=text,
            traceback=_shortened(shown.replace(f"{sources}/", "") if sources else shown),
            pickled=_pickled(error),
            time=time,
            is_consequence=isinstance(error, ConnectionError)
            or name in CONSEQUENCE_TYPES
            or (isinstance(error, (RuntimeError, OSError)) and CONSEQUENCES.search(text) is not None),
            position=position,
            is_final=is_final,
        )

    def rebuilt(self) -> Exception | None:
        """The exception in its own type: unpickled, or of a builtin type with the same text; None where neither can be.

        Exceptions that would end the driver (`SystemExit`, `KeyboardInterrupt`) are not rebuilt.
        """
        error: object = None
        if self.pickled is not None:
            try:
                error = cloudpickle.loads(self.pickled)  # from our own rank, by its agent's connection
            except Exception:
                error = None
        if error is None:
            kind = getattr(builtins, self.type_name, None)
            if isinstance(kind, type) and issubclass(kind, Exception):
                try:
                    error = kind(self.message)
                except TypeError:  # UnicodeDecodeError and its like
                    error = None
        return error if isinstance(error, Exception) else None


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
    step: int | None = None
    """The newest step that it had named."""
    agent_traceback: str | None = None
    """The agent that watched it failed, like this."""

    @property
    def position(self) -> tuple[int | None, int | None]:
        """Where it was: the newest step that it had named and, where it could still say, its signs of life since."""
        return self.failure.position if self.failure is not None else (self.step, None)

    @property
    def is_consequence(self) -> bool:
        """It may well have ended because another rank did."""
        if self.hang is not None:
            return False
        return self.stopped if self.failure is None else self.failure.is_consequence

    @property
    def is_infrastructure(self) -> bool:
        """Taken away from outside: with its worker, or by a signal that code does not send itself by accident."""
        if self.failure is not None or self.hang is not None or self.out_of_memory:
            return False
        return self.exitcode in (None, -signal.SIGKILL, -signal.SIGTERM)


def find_culprit(exits: Iterable[RankExit]) -> RankExit:
    """The exit that caused the others.

    A rank's own exception comes before signals and unexpected exits, these before a lost worker, that before a hang,
    and that before errors that read like the loss of a peer, and before ranks that we stopped; among equals the first
    in time.
    """
    return min(exits, key=lambda e: (_severity(e), e.failure.time if e.failure else e.time))


def _severity(exit_: RankExit) -> int:
    if exit_.failure is not None and not exit_.failure.is_consequence:  # even of a rank that was then told to stop
        return 0
    if exit_.hang is not None:
        return 4
    if exit_.failure is not None:
        return 5
    if exit_.stopped:
        return 6
    if exit_.exitcode is None:
        return 3
    return 2 if exit_.out_of_memory else 1


def describe(exit_: RankExit) -> str:
    """How a rank ended, in a line."""
    if exit_.failure is not None:
        text = exit_.failure.message
        return f"{exit_.failure.type_name}: {text}" if text else exit_.failure.type_name
    if exit_.hang is not None:
        return exit_.hang.partition("\n")[0]
    if exit_.exitcode is None:
        last_line = (exit_.agent_traceback or "").rstrip().rpartition("\n")[2]
        return f"the agent that watches it failed: {last_line}" if last_line else "its worker was lost"
    if exit_.out_of_memory:
        return "killed for memory: the container's limit was reached (raise its mem limit, or use less)"
    if exit_.exitcode < 0:
        number = -exit_.exitcode
        hint = " (killed from outside, or for memory)" if number == signal.SIGKILL else ""
        return f"ended by signal {number}, {_signal_name(number)}{hint}"
    return f"its process ended early with exit code {exit_.exitcode}, without returning a result"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most of the real-time signals have no name
        return "a real-time signal"


def verdict(culprit: RankExit, world_size: int, refusal: str = "", history: Sequence[str] = ()) -> Exception:
    """What the driver raises for a failed gang: the culprit's own exception from a `GangError`, or that error alone.

    Args:
        culprit: From `find_culprit`.
        world_size: The number of ranks.
        refusal: Why the gang does not start again.
        history: What ended its earlier generations, a line each.
    """
    who, how = f"rank {culprit.rank}", describe(culprit)
    rank_traceback = culprit.failure.traceback if culprit.failure else ""
    step = culprit.position[0]
    where = f" after step {step}" if step is not None else ""
    message = f"{who} of {world_size} failed on {culprit.worker} (host {culprit.host}){where}: {how}"
    if history:
        message += f"\n\nNot started again, because {refusal}. Failures before this one:\n" + "\n".join(history)
    if culprit.hang is not None:
        message += "\n" + culprit.hang.partition("\n")[2]
    if rank_traceback:
        message += f"\n\nTraceback of {who}:\n{rank_traceback.rstrip()}"
    if culprit.agent_traceback:
        message += f"\n\nTraceback of its agent:\n{culprit.agent_traceback.rstrip()}"
    if culprit.log_tail:
        message += f"\n\nThe end of {who}'s log (all of it is in this task's log, marked [{who}]):\n{culprit.log_tail}"
    kind = GangHungError if culprit.hang is not None and culprit.failure is None else GangError
    if culprit.is_infrastructure:
        kind = WorkerLostError
    error = kind(
        message,
        rank=culprit.rank,
        worker=culprit.worker,
        host=culprit.host,
        cause=how,
        step=step,
        time=culprit.failure.time if culprit.failure else culprit.time,
        rank_traceback=rank_traceback,
        log_tail=culprit.log_tail,
    )
    original = culprit.failure.rebuilt() if culprit.failure else None
    if original is None:
        return error
    original.__cause__ = error
    return original


def _shortened(text: str) -> str:
    """At most `MAX_TEXT` characters of it, from both ends, and a word about the rest."""
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"


def _pickled(error: BaseException) -> bytes | None:
    try:
        pickling_support.install(error)  # with its traceback and causes, and whatever its __init__ asks for
        data = cloudpickle.dumps(error)
        if type(pickle.loads(data)) is not type(error):  # noqa: S301 - made two lines above
            return None
    except Exception:
        return None
    return bytes(data) if len(data) <= MAX_PICKLED else None
