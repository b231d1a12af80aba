"""Calls of one gang that stays: those that wait, and the one that its ranks run. Runs in the driver.

    ask ──▶ waiting ──▶ running ──▶ ended in all ranks, or with the gang

The caller's threads use the methods of the first group. All other methods run in the gang's thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from flytekitplugins.daskpytorch.driver.blame import error_of, find_root_failure, from_user
from flytekitplugins.daskpytorch.driver.part import Part
from flytekitplugins.daskpytorch.protocol import journal, messages
from flytekitplugins.daskpytorch.protocol.job import in_order
from flytekitplugins.daskpytorch.protocol.messages import CallEnded, Forget, Question, Tell
from flytekitplugins.daskpytorch.records import LogRecord

if TYPE_CHECKING:
    from flytekitplugins.daskpytorch.driver.agents import Peer
    from flytekitplugins.daskpytorch.driver.attempt import Answers, Attempt
    from flytekitplugins.daskpytorch.driver.state import GangState
    from flytekitplugins.daskpytorch.protocol.failure import Recalled


@dataclass(frozen=True, kw_only=True)
class Outcome:
    values: Mapping[int, Callable[[], Any]] = field(default_factory=dict)
    errors: Mapping[int, Exception] = field(default_factory=dict)
    cause: int | None = None
    end: BaseException | None = None
    """Error of all ranks' futures: the call was cancelled, or the gang has ended before the call."""


@dataclass(eq=False, kw_only=True)
class StayingCall:
    number: int
    name: str
    call: bytes = field(repr=False)
    keeps: bool = False
    log: Callable[[LogRecord], object]
    settle: Callable[[Outcome], object]
    """Called once in the gang's thread, when the call has ended in all ranks."""
    ended: dict[int, CallEnded] = field(default_factory=dict)
    told: Answers | None = None
    """The ranks' newest collectives after an exception."""


class Calls(Part):
    takes = (CallEnded, LogRecord)
    _state: GangState

    def __init__(self) -> None:
        self.post: Callable[[Callable[[], object]], object] = lambda _: None
        """Queues a function for the gang's thread. Set by the supervisor."""
        self.has_formed = threading.Event()
        """Also set when the gang ends."""
        self.num_ranks = 0
        self.open: dict[int, StayingCall] = {}
        """Calls that have not ended, by number."""
        self.current: StayingCall | None = None
        self.end: BaseException | None = None
        self.is_closed = False
        self._is_over = False
        self._lock = threading.Lock()
        self._waiting: deque[StayingCall | Forget] = deque()

    # ---- from the caller's threads

    def ask(self, call: StayingCall) -> bool:
        """Queue a call. Return False if the gang is closed or has ended."""
        with self._lock:
            if self.is_closed or self.end is not None:
                return False
            self.open[call.number] = call
            self._waiting.append(call)
        self.post(bool)  # wakes the gang's thread
        return True

    def forget(self, number: int) -> None:
        """Free a kept value after the calls before. Finalizers may call this method."""
        self._waiting.append(Forget(number))
        self.post(bool)

    def cancel(self, number: int) -> None:
        """Drop a waiting call, or end the gang in a running one."""
        self.post(partial(self._cancel, number))

    def finish(self, *, cancels: bool = False) -> None:
        """End the gang after the calls so far, or with them."""
        with self._lock:
            self.is_closed = True
        self.post(self._cancel_all if cancels else bool)

    # ---- in the gang's thread

    def join(self, state: GangState) -> None:
        self._state = state

    def begin(self, attempt: Attempt) -> None:
        attempt.at_rest.update(attempt.places)

    def _cancel(self, number: int) -> None:
        call = self.open.get(number)
        if call is not None and call is self.current:
            self._state.cancel()
        elif call is not None:
            self._waiting.remove(call)
            self._settle(call, Outcome(end=CancelledError("the call was cancelled")))

    def _cancel_all(self) -> None:
        if self.open:
            self._state.cancel()

    def take(self, peer: Peer, attempt: Attempt, rank: int, report: object) -> None:
        if (call := self.current) is None:
            return
        if isinstance(report, LogRecord):
            call.log(report)
        elif isinstance(report, CallEnded):
            call.ended[rank] = report
            attempt.at_rest.add(rank)
            attempt.on_over(rank, None)
            if report.failure is not None and report.failure.is_consequence:  # a rank or the process group is lost
                attempt.note_failure(rank, report.failure)
            elif report.failure is not None:
                attempt.survived[rank] = report.failure

    def orders(self, now: float) -> None:
        attempt, is_stopping = self._state.training, self._state.stop_request is not None
        if attempt is None or not attempt.is_formed or attempt.is_failing or attempt.results or self._is_over:
            return
        if not self.has_formed.is_set():
            self.num_ranks = attempt.world_size  # `min_workers` may have made it smaller
            self.has_formed.set()
        if (call := self.current) is not None and len(call.ended) == attempt.world_size:
            self._end(call, attempt)
        while self.current is None and self._waiting and not is_stopping:
            self._begin(self._waiting.popleft(), attempt)
        if self.current is None and (self.is_closed or is_stopping):
            self._is_over = True
            attempt.tell(Tell(messages.Finish()))

    def _begin(self, call: StayingCall | Forget, attempt: Attempt) -> None:
        if isinstance(call, Forget):
            attempt.tell(Tell(call))
            return
        self.current = call
        attempt.at_rest.clear()
        attempt.steps.clear()  # an asynchronous save reports after its call's end, too
        attempt.excuse()
        sent = in_order(call.call, call.number)
        attempt.tell(Tell(messages.NextCall(number=call.number, call=sent, keeps=call.keeps)))
        self._state.observers.tell(journal.Calling(name=call.name))

    def _end(self, call: StayingCall, attempt: Attempt) -> None:
        if attempt.survived and (not _have_told(call, attempt) or self._cannot_go_on(call, attempt)):
            return
        self.current = None
        exits = {rank: attempt.exit_of_survivor(rank) for rank in attempt.survived}
        errors = {rank: from_user(error_of(exit_, attempt.world_size)) for rank, exit_ in exits.items()}
        cause = find_root_failure(exits.values()).rank if exits else None
        end = journal.End.of(errors[cause] if cause is not None else None)
        self._state.observers.tell(journal.Called(name=call.name, end=end))
        attempt.survived.clear()  # no cause of a later loss
        returned = {rank: said.value for rank, said in call.ended.items() if said.failure is None}
        values = {rank: self._state.received.take_returned(rank, value) for rank, value in returned.items()}
        self._settle(call, Outcome(values=values, errors=errors, cause=cause))

    def _cannot_go_on(self, call: StayingCall, attempt: Attempt) -> bool:
        if (parted := _parted(call.told or {})) is None:
            return False
        for rank, failure in dict(attempt.survived).items():
            attempt.note_failure(rank, failure)
        self._state.observers.note(f"the gang cannot go on: {parted}")
        return True

    def _settle(self, call: StayingCall, outcome: Outcome) -> None:
        with self._lock:
            del self.open[call.number]
        call.settle(outcome)

    def note_end(self, error: BaseException | None) -> None:
        """Fail all calls that have not ended. `error` is None if the gang was closed."""
        with self._lock:
            self.end = error or CancelledError("the gang was closed")
        for call in list(self.open.values()):
            self._settle(call, Outcome(end=self.end))
        self.has_formed.set()


def _have_told(call: StayingCall, attempt: Attempt) -> bool:
    if call.told is None:
        call.told = attempt.ask(Question.COLLECTIVES)
    return attempt.have_answered(call.told)


def _parted(remembered: Mapping[int, Recalled | None]) -> str | None:
    """Return how ranks have left a call at different collectives. None: their next collectives meet."""
    numbers = {rank: each.newest_of_all for rank, each in remembered.items() if each is not None}
    known = {rank: number for rank, number in numbers.items() if number}
    if len(set(known.values())) <= 1:
        return None
    least, most = min(known, key=known.__getitem__), max(known, key=known.__getitem__)
    return f"rank {least} had entered {known[least]} collectives when it left the call, rank {most} {known[most]}"
