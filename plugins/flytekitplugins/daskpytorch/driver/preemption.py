"""Brings a gang to its end at one common step, and says how long that may take. Runs in the driver."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from flytekitplugins.daskpytorch.driver.attempt import Attempt
from flytekitplugins.daskpytorch.protocol.messages import Tell
from flytekitplugins.daskpytorch.protocol.orders import Hold, Release


class Deadlines:
    """Seconds for each part of an end; one told by SIGTERM takes at most one and a half times the grace period.

    SIGTERM ── `grace_period` ──▶ ranks have stopped ── `storage` ──▶ their checkpoint is stored ── `results` ──▶ end
    """

    def __init__(self, grace_period: float) -> None:
        self.grace_period = grace_period
        """For the ranks to stop by themselves, at a call of `should_stop`."""
        self.unheeded = grace_period / 4
        """The same where no rank has ever called it."""
        self.storage = grace_period * 0.35
        """For the newest checkpoint to reach Flyte's storage."""
        self.cancelled = min(1.0, grace_period / 20)
        """The same for a gang that was cancelled, by Ctrl-C, say: somebody waits."""
        self.results = grace_period / 10
        """For what the ranks have submitted to reach it."""
        self.stop = min(0.5, grace_period / 40)
        """For a rank to end once it is told to, before it is killed."""
        self.close = grace_period / 2
        """The same for rank 0, where it has observers that have something to close."""
        self.reopen = grace_period / 20
        """The same where the next attempt opens again what they close."""
        self.all_stopped = grace_period * 0.75
        """For word that all ranks have ended, after which a node counts as lost; more than any of them gets."""
        self.upload = grace_period / 2
        """For a checkpoint that is on its way to the driver when the last attempt ends."""
        self.dismiss = grace_period / 4
        """For the agents to clean up after the last rank."""


@dataclass
class StopRequest:
    """The gang is to save a checkpoint and end: every rank at the same call of `should_stop` (see `StopSignal`)."""

    reason: str
    ends_gang: bool
    """Else it goes on without the worker that is being taken away."""
    deadlines: Deadlines
    is_workers: bool = False
    """A worker asks for it, which is being taken away."""
    is_awaited: bool = False
    """Somebody waits for the end: ranks that never ask whether they should stop are ended at once."""
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)
    deadline: float = field(init=False)
    """When those are ended that have not stopped; by the clock."""
    _is_asked: bool = False
    """The ranks were told to hold their next call."""
    _is_released: bool = False
    """They were told at which call it turns true."""

    def __post_init__(self) -> None:
        self.deadline = self.clock() + self.deadlines.grace_period

    def pursue(self, attempt: Attempt) -> bool:
        """Do what is next, by telling the attempt's agents; whether the time is up."""
        if not self._is_asked:
            self._is_asked = True
            attempt.tell(Tell(Hold()))
        elif not self._is_released and attempt.have_answered(attempt.held):
            self._is_released = True
            last_call = max(attempt.held.values(), default=0)
            attempt.tell(Tell(Release(last_call)))
            if last_call == 0:
                unheeded = 0.0 if self.is_awaited else self.deadlines.unheeded
                self.deadline = min(self.deadline, self.clock() + unheeded)
        return self.clock() >= self.deadline and not attempt.has_delivered
