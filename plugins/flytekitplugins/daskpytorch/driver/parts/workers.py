"""Ends attempts for more workers, which have come, or for a request to stop. Runs in the driver."""

import contextlib

from flytekitplugins.daskpytorch.driver.attempt import Answers, Attempt
from flytekitplugins.daskpytorch.driver.part import Part
from flytekitplugins.daskpytorch.driver.state import GangState, StopRequest
from flytekitplugins.daskpytorch.errors import WorkerLostError
from flytekitplugins.daskpytorch.protocol.checkpoints import CheckpointEntry
from flytekitplugins.daskpytorch.protocol.messages import Question, Release, Tell

GROWS = "more workers have come"


class Growth(Part):
    """Ends an attempt on too few workers, so that the next one begins with more. A gang that stays does not grow."""

    _has_kept = False
    """A checkpoint was kept right before this decision: a restart loses no steps."""

    def __init__(self, state: GangState) -> None:
        self._state = state

    def begin(self, attempt: Attempt) -> None:
        self._has_kept = False

    def note_kept(self, entry: CheckpointEntry) -> None:
        self._has_kept = True

    def ends(self, attempt: Attempt) -> bool | None:
        agents = self._state.agents
        is_fresh, self._has_kept = self._has_kept, False
        if len(attempt.ranks_of) >= agents.num_wanted or self._state.request.stays:
            return None
        if is_fresh and not attempt.results and agents.can_grow(attempt.ranks_of):
            attempt.ended_for = GROWS
        with contextlib.suppress(WorkerLostError):  # the workers leave by themselves after their scheduler
            agents.recruit()
        return attempt.ended_for is not None or None


class Preemption(Part):
    """Has all ranks block their next call of `should_stop` (`Question.HOLD`), then lets them stop at one call.

    A program that never calls `should_stop` gets the signal, if it handles it.
    """

    def __init__(self, state: GangState) -> None:
        self._state = state

    def begin(self, attempt: Attempt) -> None:
        self._held: Answers | None = None
        self._is_released = False

    def ends(self, attempt: Attempt) -> bool | None:
        if (request := self._state.stop_request) is None:
            return None
        if self._held is None:
            passes_signal = attempt.is_program and request.ends_gang
            self._held = attempt.ask(Question.HOLD, request.signal if passes_signal else None)
        elif not self._is_released and attempt.have_answered(self._held):
            self._release(attempt, request, self._held)
        return attempt.clock() >= request.deadline and not attempt.has_delivered

    def _release(self, attempt: Attempt, request: StopRequest, held: Answers) -> None:
        self._is_released = True
        request.heeding = {rank for rank, (_, heeds_signal) in held.items() if heeds_signal}
        last_call = max((num_calls for num_calls, _ in held.values()), default=0)
        request.has_signalled = last_call == 0 and bool(request.heeding)
        attempt.tell(Tell(Release(last_call, request.signal if request.has_signalled else None)))
        if last_call == 0 and not request.has_signalled:
            unheeded = 0.0 if request.is_awaited else self._state.deadlines.unheeded
            request.deadline = min(request.deadline, attempt.clock() + unheeded)

    def due(self, attempt: Attempt) -> float | None:
        request = self._state.stop_request
        return request.deadline if request is not None and not attempt.has_delivered else None
