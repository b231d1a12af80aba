"""Finds the rank whose failure caused the others, and decides whether the gang may restart. Free of state and I/O."""

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self

from flytekitplugins.daskpytorch.errors import GangError, GangHungError, Kind, WorkerLostError
from flytekitplugins.daskpytorch.protocol.failure import RankExit, without_ours
from flytekitplugins.daskpytorch.protocol.placement import title_of

REPEATED = "the same error came at the same step twice"
IS_FINAL = "another attempt would end in the same way"
MAX_AFTER_MEMORY = 3
NO_RESTARTS = "max_restarts is 0"
STATE_IS_GONE = "a gang that stays loses with one rank what its ranks keep: begin a new gang, and keep everything again"


def find_root_failure(exits: Iterable[RankExit]) -> RankExit:
    """Return the exit that caused the others: the earliest of the most severe exits.

    In order of severity:

    1. the rank's own exception
    2. a signal or an unexpected exit, then a kill for memory
    3. a lost worker
    4. a hang
    5. an error that reads like the loss of a peer, or an abort by NCCL's watchdog
    6. a rank that the driver stopped
    """
    return min(exits, key=lambda e: (_severity(e), e.failure.time if e.failure else e.time))


def _severity(exit_: RankExit) -> int:
    if exit_.failure is not None and not exit_.failure.is_consequence:  # even of a rank that was later told to stop
        return 0
    if exit_.hang is not None:
        return 4
    if exit_.failure is not None or (exit_.watchdog and not exit_.gpu_fault):
        return 5
    if exit_.stopped:
        return 6
    if exit_.exitcode is None:
        return 3
    return 2 if exit_.out_of_memory else 1


def end_of(exit_: RankExit) -> tuple[Kind, str]:
    """Return the kind of a rank's end, and its cause in words."""
    kind, cause = _own_end_of(exit_)
    return "desync" if exit_.left_by or exit_.difference is not None else kind, exit_.left_by or cause


def _own_end_of(exit_: RankExit) -> tuple[Kind, str]:  # noqa: PLR0911 - a return for each end
    if exit_.gpu_fault:
        return "lost", f"{exit_.gpu} of host {exit_.host} failed: {exit_.gpu_fault}"
    if exit_.failure is not None:
        name, text = exit_.failure.type_name, exit_.failure.message
        kind: Kind = "memory" if exit_.failure.is_of_memory else "exception"
        return "exit" if name == SystemExit.__name__ else kind, f"{name}: {text}" if text else name
    if exit_.hang is not None:
        return "hang", exit_.hang.partition("\n")[0]
    if exit_.exitcode is None:
        last_line = (exit_.agent_traceback or "").rstrip().rpartition("\n")[2]
        return "lost", f"the agent that watches it failed: {last_line}" if last_line else "its worker was lost"
    if exit_.out_of_memory:
        return "memory", "killed for memory: the container's limit was reached (raise its mem limit, or use less)"
    if exit_.exitcode < 0:
        number = -exit_.exitcode
        hint = " (killed from outside, or for memory)" if number == signal.SIGKILL else ""
        hint += f" of torch's NCCL watchdog, which said: {exit_.watchdog.strip()[:500]}" if exit_.watchdog else ""
        kind = "lost" if exit_.watchdog else "signal"  # the watchdog has lost a peer or the network
        return kind, f"ended by signal {number}, {_signal_name(number)}{hint}"
    return "exit", f"its process ended with exit code {exit_.exitcode}, without an exception"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most of the real-time signals have no name
        return "a real-time signal"


def error_of(root_failure: RankExit, world_size: int, refusal: str = "", history: Sequence[str] = ()) -> Exception:
    """Return the failed rank's own exception, with a `GangError` as its cause.

    The `GangError` itself if the exception cannot be rebuilt, or infrastructure was lost.
    """
    type_ = GangHungError if root_failure.hang is not None and root_failure.failure is None else GangError
    if root_failure.is_infrastructure:
        type_ = WorkerLostError
    kind, cause = end_of(root_failure)
    error = type_(
        _message(root_failure, world_size, refusal, history),
        rank=root_failure.rank,
        worker=root_failure.worker,
        host=root_failure.host,
        cause=cause,
        step=root_failure.position[0],
        time=root_failure.failure.time if root_failure.failure else root_failure.time,
        rank_traceback=root_failure.failure.traceback if root_failure.failure else "",
        log_tail=root_failure.log_tail,
        is_repeated=refusal == REPEATED,
        exit_code=root_failure.own_exit_code,
        kind=kind,
    )
    original = root_failure.failure.rebuilt() if root_failure.failure and not root_failure.left_by else None
    if original is None or root_failure.is_infrastructure:
        return error
    original.__cause__ = error
    return original


def _message(root_failure: RankExit, world_size: int, refusal: str, history: Sequence[str]) -> str:
    who, step = f"rank {root_failure.rank}", root_failure.position[0]
    where = f" after step {step}" if step is not None else ""
    on = title_of(root_failure.worker, root_failure.host)
    message = f"{who} of {world_size} failed on {on}{where}: {end_of(root_failure)[1]}"
    if refusal:
        message += f"\n\nNot started again, because {refusal}."
    if history:
        message += " Failures before this one:\n" + "\n".join(history)
    if root_failure.difference is not None:
        message += f"\n\nThe ranks do not agree in their collectives: {root_failure.difference}"
    if root_failure.hang is not None:
        message += "\n" + root_failure.hang.partition("\n")[2]
    if root_failure.failure is not None and root_failure.failure.traceback:
        message += f"\n\nTraceback of {who}:\n{root_failure.failure.traceback.rstrip()}"
    if root_failure.agent_traceback:
        message += f"\n\nTraceback of its agent:\n{root_failure.agent_traceback.rstrip()}"
    if root_failure.log_tail and root_failure.hang is None:  # a hung rank's log ends with the stacks of all threads
        message += f"\n\nThe end of {who}'s log (all of it is in this task's log, marked [{who}]):\n"
        message += root_failure.log_tail
    return message


def from_user(error: Exception) -> Exception:
    """Remove this package's outermost frames from a failed gang's error, but not from an error of the driver itself."""
    if isinstance(error, GangError) or isinstance(error.__cause__, GangError):
        error.__traceback__ = without_ours(error.__traceback__)
    return error


@dataclass(frozen=True, kw_only=True)
class AttemptFailure:
    what: str
    cause: str
    """Cause without the rank, to compare failures. Exceptions count by type and raising line: their text may hold a
    time or address."""
    position: tuple[int | None, int | None] = (None, None)
    is_infrastructure: bool
    kind: Kind = "preempted"
    is_final: bool = False
    adapts: bool = False
    is_stuck: bool = False
    """An exception before progress: no checkpoint was saved or is in transit, and no rank was asked to stop."""

    @classmethod
    def of(
        cls, root_failure: RankExit, *, gets_further: bool, has_delivered: bool = False, adapts: bool = False
    ) -> Self:
        (kind, how), failure = end_of(root_failure), root_failure.failure
        is_late = has_delivered and not root_failure.is_infrastructure  # all ranks had ended their program before
        step = root_failure.position[0]
        where = f" after step {step}" if step is not None else ""
        is_own = failure is not None and not failure.is_consequence and not root_failure.gpu_fault
        cause = "a hang" if root_failure.hang is not None else how
        return cls(
            what=f"rank {root_failure.rank} on {title_of(root_failure.worker, root_failure.host)}{where}: {how}",
            cause=cause if failure is None or root_failure.gpu_fault else f"{failure.type_name} at {failure.place}",
            position=root_failure.position,
            is_infrastructure=root_failure.is_infrastructure,
            kind=kind,
            is_final=bool(root_failure.left_by) or (failure.is_final if failure is not None else is_late),
            adapts=adapts and kind == "memory",
            is_stuck=is_own and not gets_further,
        )

    @property
    def budget(self) -> str:
        if self.adapts:
            return "lacks of memory"
        return "losses of infrastructure" if self.is_infrastructure else "errors of the function"


@dataclass
class FailurePolicy:
    limit: int
    without: str = NO_RESTARTS
    failures: list[AttemptFailure] = field(default_factory=list)

    def refusal(self, failure: AttemptFailure) -> str | None:
        alike = [earlier for earlier in self.failures if earlier.budget == failure.budget]
        if self.limit == 0:
            return self.without
        if failure.is_final:
            return IS_FINAL
        is_same = bool(alike) and (alike[-1].cause, alike[-1].position) == (failure.cause, failure.position)
        if is_same and not (failure.is_infrastructure or failure.adapts):
            return REPEATED
        if failure.is_stuck and not failure.adapts:
            return "no checkpoint had been saved since the start, and the same steps would lead to the same error"
        limit, name = (MAX_AFTER_MEMORY, "a limit of ") if failure.adapts else (self.limit, "max_restarts=")
        return f"{name}{limit} is used up by {failure.budget}" if len(alike) >= limit else None
