"""Brings a gang to its end at one common step, since the task or a worker is being taken away. Runs in the driver."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from flytekitplugins.daskpytorch.driver.attempt import Attempt
from flytekitplugins.daskpytorch.driver.deadlines import Deadlines
from flytekitplugins.daskpytorch.protocol.messages import Tell
from flytekitplugins.daskpytorch.protocol.orders import Hold, Release

__all__ = ["StopRequest"]


@dataclass
class StopRequest:
    """The gang is to save a checkpoint and end: every rank at the same call of `should_stop` (see `StopSignal`)."""

    reason: str
    ends_gang: bool
    """Else it goes on without the worker that is being taken away."""
    deadlines: Deadlines
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)
    """Seconds that only go forward."""
    deadline: float = field(init=False)
    """When those are ended that have not stopped; by the clock."""
    _is_asked: bool = False
    """The ranks were told to hold their next call."""
    _is_released: bool = False
    """They were told at which call it turns true."""

    def __post_init__(self) -> None:
        self.deadline = self.clock() + self.deadlines.grace_period

    def pursue(self, attempt: Attempt, tell: Callable[[Tell], None]) -> bool:
        """Do what is next, by telling the attempt's agents; whether the time is up."""
        if not self._is_asked:
            self._is_asked = True
            tell(Tell(Hold()))
        elif not self._is_released and attempt.have_answered(attempt.held):
            self._is_released = True
            last_call = max(attempt.held.values(), default=0)
            tell(Tell(Release(last_call)))
            if last_call == 0:
                self.deadline = min(self.deadline, self.clock() + self.deadlines.unheeded)
        return self.clock() >= self.deadline and not attempt.has_delivered
