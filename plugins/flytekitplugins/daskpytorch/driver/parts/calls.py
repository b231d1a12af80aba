"""Calls of one gang that stays: those that wait, and the one that its ranks run. Runs in the driver.

    ask ──▶ waiting ──▶ running ──▶ ended in all ranks, or with the gang

The caller's threads use `ask`, `interrupt` and `close`. All other methods run in the gang's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from flytekitplugins.daskpytorch.driver.blame import error_of, find_root_failure, from_user
from flytekitplugins.daskpytorch.driver.part import Moment, Part
from flytekitplugins.daskpytorch.protocol import journal, messages
from flytekitplugins.daskpytorch.protocol.messages import CallEnded, Forget, Question, Tell

if TYPE_CHECKING:
    from flytekitplugins.daskpytorch.driver.agents import Peer
    from flytekitplugins.daskpytorch.driver.attempt import Answers, Attempt
    from flytekitplugins.daskpytorch.driver.received import ReceivedResults
    from flytekitplugins.daskpytorch.driver.state import GangState
    from flytekitplugins.daskpytorch.protocol.code import Code
    from flytekitplugins.daskpytorch.protocol.failure import Recalled
    from flytekitplugins.daskpytorch.protocol.payload import SharedMemory

LEAVE_TIME = 10.0

COMPARE_TIME = 5.0
"""Seconds to wait for the ranks' newest collectives after a call that has failed or was interrupted."""


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
    call: bytes
    code: Code | None = None
    """None if no module has been imported since the call before."""
    large: SharedMemory | None = None
    keeps: bool = False
    settle: Callable[[Outcome], object]
    """Called once in the gang's thread, when the call has ended in all ranks."""
    ended: dict[int, CallEnded] = field(default_factory=dict)
    received: ReceivedResults | None = None
    is_interrupted: bool = False
    halted: Answers | None = None
    at: int | None = None
    """Collective after which all ranks leave the interrupted call. None: some have yet to halt."""
    told: Answers | None = None
    compare_by: float = 0.0
    leave_by: float | None = None

    def finish(self, outcome: Outcome) -> None:
        if self.large is not None:
            self.large.close()
        self.settle(outcome)


class Calls(Part):
    takes = (CallEnded,)
    _state: GangState

    def __init__(self) -> None:
        self.post: Callable[[Callable[[], object]], object] = lambda _: None
        """Queues a function for the gang's thread. Set by the supervisor."""
        self.current: StayingCall | None = None
        self.is_over = False
        self._waiting: deque[StayingCall | Forget] = deque()
        self._code: Code | None = None
        """Newest sources that the ranks lack, for the next call that begins, since calls may be dropped."""
        self._is_closing = False

    # ---- from the caller's threads

    def ask(self, call: StayingCall | Forget) -> None:
        """Queue a call, or the order to free a kept value. Finalizers may call this method."""
        self.post(partial(self._queue, call))

    def interrupt(self, call: StayingCall) -> None:
        """End a running call by `KeyboardInterrupt` in all ranks, or drop a waiting call. Safe in signal handlers."""
        self.post(partial(self._interrupt, call))

    def close(self) -> None:
        self.post(self._close)

    # ---- in the gang's thread

    def join(self, state: GangState) -> None:
        self._state = state

    def _queue(self, call: StayingCall | Forget) -> None:
        if isinstance(call, StayingCall):
            self._code = call.code or self._code
        self._waiting.append(call)

    def _close(self) -> None:
        self._is_closing = True

    def _interrupt(self, call: StayingCall) -> None:
        if call is self.current:
            call.is_interrupted = True
        elif call in self._waiting:
            self._waiting.remove(call)
            call.finish(Outcome(end=_cancelled()))

    def take(self, peer: Peer, attempt: Attempt, rank: int, report: object) -> None:
        call = self.current
        if not isinstance(report, CallEnded) or call is None or report.number != call.number:
            return
        call.ended[rank], call.received = report, self._state.received
        attempt.at_rest.add(rank)
        attempt.on_over(rank, None)
        failure = report.failure
        if failure is None:
            return
        if failure.is_consequence:  # another rank, or the process group, is lost
            attempt.note_failure(rank, failure)
        elif not (call.is_interrupted and failure.type_name == KeyboardInterrupt.__name__):
            attempt.survived[rank] = failure

    def orders(self, now: float) -> None:
        attempt, is_stopping = self._state.training, self._state.stop_request is not None
        if attempt is None:
            return
        if self.current is None:
            attempt.at_rest.update(attempt.places)
        if not attempt.is_formed or attempt.is_failing or attempt.results or self.is_over:
            return
        if (call := self.current) is not None:
            if len(call.ended) == attempt.world_size:
                self._end(call, attempt)
            elif call.is_interrupted:
                self._have_left(call, attempt)
        while self.current is None and self._waiting and not is_stopping:
            self._begin(self._waiting.popleft(), attempt)
        if self.current is None and (self._is_closing or is_stopping):
            self.is_over = True
            attempt.tell(Tell(messages.Finish()))

    def _begin(self, call: StayingCall | Forget, attempt: Attempt) -> None:
        if isinstance(call, Forget):
            attempt.tell(Tell(call))
            return
        self.current = call
        attempt.at_rest.clear()
        attempt.steps.clear()  # an asynchronous save reports after its call's end, too
        attempt.excuse()
        address = call.large.address if call.large is not None else None
        code, self._code = self._code, None
        following = messages.NextCall(number=call.number, call=call.call, code=code, large=address, keeps=call.keeps)
        attempt.tell(Tell(following))
        self._state.observers.tell(journal.Calling(name=call.name))

    def _have_left(self, call: StayingCall, attempt: Attempt) -> None:
        if call.leave_by is None:
            call.leave_by = attempt.clock() + LEAVE_TIME
            call.halted = attempt.ask(Question.HALT, call.number)
            return
        if call.at is None and call.halted is not None and len(call.halted) == attempt.world_size:
            call.at = max(call.halted.values())
            attempt.tell(Tell(messages.EndCall(call.number, call.at)))
        if attempt.clock() >= call.leave_by and not self._state.blocks(Moment.LATE):
            rank = min(attempt.places.keys() - call.ended.keys())
            attempt.hang = (
                rank,
                (
                    f"it had not left the call of {call.name} {LEAVE_TIME:g} s after Ctrl-C or cancel: it may wait in "
                    "a collective for a rank that has left the call, or in C code"
                ),
            )

    def _end(self, call: StayingCall, attempt: Attempt) -> None:
        if call.is_interrupted or attempt.survived:
            if not _have_told(call, attempt):
                return
            if call.told is not None and (parted := _parted(call.told)) is not None:
                _break(call, attempt, *parted)
                self._state.observers.note(f"the gang cannot go on: {parted[1]}")
                return
        self.current = None
        exits = {rank: attempt.exit_of_survivor(rank) for rank in attempt.survived}
        errors = {rank: from_user(error_of(exit_, attempt.world_size)) for rank, exit_ in exits.items()}
        cause = find_root_failure(exits.values()).rank if exits else None
        stop = KeyboardInterrupt("the call was interrupted") if call.is_interrupted else None
        end = journal.End.of(stop or (errors[cause] if cause is not None else None))
        self._state.observers.tell(journal.Called(name=call.name, end=end))
        attempt.survived.clear()  # no cause of a later loss
        attempt.steps.clear()
        values = _taken(call)
        cancelled = _cancelled() if call.is_interrupted else None
        call.finish(Outcome(values=values, errors=errors, cause=cause, end=cancelled))


def _cancelled() -> CancelledError:
    return CancelledError("the call was cancelled")


def _have_told(call: StayingCall, attempt: Attempt) -> bool:
    if call.told is None:
        call.told = attempt.ask(Question.COLLECTIVES)
        call.compare_by = attempt.clock() + COMPARE_TIME
    return attempt.have_answered(call.told) or attempt.clock() >= call.compare_by


def _taken(call: StayingCall) -> dict[int, Callable[[], Any]]:
    if call.received is None:
        return {}
    if call.is_interrupted:
        call.received.drop_returned()
        return {}
    returned = {rank: said.value for rank, said in call.ended.items() if said.failure is None}
    return {rank: call.received.take_returned(rank, value) for rank, value in returned.items()}


def _parted(remembered: Mapping[int, Recalled | None]) -> tuple[int, str] | None:
    """Return a rank that has left a call at another collective than the others, and a text. None: all may go on.

    The next collectives of two ranks meet if their newest have the same number.
    """
    numbers = {rank: each.newest_of_all for rank, each in remembered.items() if each is not None}
    known = {rank: number for rank, number in numbers.items() if number}
    if len(set(known.values())) <= 1:
        return None
    least = min(known, key=known.__getitem__)
    most = max(known, key=known.__getitem__)
    text = f"rank {least} had entered {known[least]} collectives when it left the call, rank {most} {known[most]}"
    return least, text


def _break(call: StayingCall, attempt: Attempt, rank: int, text: str) -> None:
    if not attempt.survived:
        attempt.hang = rank, f"Ctrl-C or cancel has ended the call of {call.name} between collectives: {text}"
    for failed, failure in dict(attempt.survived).items():
        attempt.note_failure(failed, failure)
