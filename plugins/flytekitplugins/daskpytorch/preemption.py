"""Brings a gang to its end at one common step, since the task or a worker is being taken away. Runs in the driver."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from flytekitplugins.daskpytorch.generation import Generation
from flytekitplugins.daskpytorch.messages import Tell
from flytekitplugins.daskpytorch.roster import Roster

__all__ = ["StopRequest"]

PREEMPTION_GRACE = 20.0
"""Seconds for the ranks to stop by themselves; Kubernetes kills a pod 30 s after it has told it to end."""
UNHEEDED_GRACE = 5.0
"""The same where no rank has ever asked `should_stop`."""


@dataclass
class StopRequest:
    """The gang is to save a checkpoint and end: every rank at the same call of `should_stop` (see `StopSignal`)."""

    reason: str
    ends_gang: bool
    """Else it goes on without the worker that is being taken away."""
    deadline: float = field(default_factory=lambda: time.monotonic() + PREEMPTION_GRACE)
    """When those are ended that have not stopped; on the monotonic clock."""
    _is_asked: bool = False
    """The ranks were told to hold their next call."""
    _is_released: bool = False
    """They were told at which call it turns true."""

    def pursue(self, generation: Generation, roster: Roster) -> bool:
        """Do what is next; whether the time is up."""
        if not self._is_asked:
            self._is_asked = True
            roster.broadcast(Tell("hold"))
        elif not self._is_released and generation.have_answered(generation.held):
            self._is_released = True
            last_call = max(generation.held.values(), default=0)
            roster.broadcast(Tell("release", last_call))
            if last_call == 0:
                self.deadline = min(self.deadline, time.monotonic() + UNHEEDED_GRACE)
        return time.monotonic() >= self.deadline and not generation.has_delivered
