"""Stops all ranks of a gang at the same call of `should_stop`, after a request to stop. Runs in the driver."""

from flytekitplugins.daskpytorch.driver.attempt import Answers, Attempt
from flytekitplugins.daskpytorch.driver.part import Part
from flytekitplugins.daskpytorch.driver.state import GangState
from flytekitplugins.daskpytorch.driver.stop_request import StopRequest
from flytekitplugins.daskpytorch.protocol.messages import Tell
from flytekitplugins.daskpytorch.protocol.orders import Release
from flytekitplugins.daskpytorch.protocol.questions import Question


class Preemption(Part):
    """Has all ranks block their next call of `should_stop` (`Question.HOLD`), then lets them stop at one call.

    A program that never calls `should_stop` gets the signal, if it handles it.
    """

    def __init__(self, state: GangState) -> None:
        self._state = state

    def begin(self, attempt: Attempt) -> None:
        """Forget the requests of earlier attempts."""
        self._held: Answers | None = None
        """The number of calls of each rank, and whether its program handles the signal. None before the question."""
        self._is_released = False
        """True once the ranks know the call at which to stop."""

    def ends(self, attempt: Attempt) -> bool | None:
        """Send the ranks the next order, after a request to stop. Return True once the driver must end them."""
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
            unheeded = 0.0 if request.is_awaited else request.deadlines.unheeded
            request.deadline = min(request.deadline, attempt.clock() + unheeded)

    def due(self, attempt: Attempt) -> float | None:
        """Return the time at which the driver ends the ranks."""
        request = self._state.stop_request
        return request.deadline if request is not None and not attempt.has_delivered else None
