"""The request to stop a gang, and the timeouts of the gang's end. Runs in the driver."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from signal import SIGINT, SIGTERM

from flytekitplugins.daskpytorch.driver.attempt import Attempt

SIGNALS = (KeyboardInterrupt.__name__, SystemExit.__name__)
"""Names of the exceptions by which a program ends after a signal."""


class Deadlines:
    """Timeouts, in seconds, of the parts of a gang's end.

    After SIGTERM the sum is at most 1.5 grace periods. It is more only if the driver has to end ranks whose trackers
    close slowly (`close`), or whose checkpoints are still on their way (`upload`).

    SIGTERM ── `grace_period` ──▶ ranks have stopped ── `storage` ──▶ their checkpoint is stored ── `results` ──▶ end
    """

    def __init__(self, grace_period: float) -> None:
        self.grace_period = grace_period
        """Timeout for ranks to stop by themselves, at a call of `should_stop`."""
        self.unheeded = grace_period / 4
        """Timeout for ranks to stop if no rank has ever called `should_stop`."""
        self.storage = grace_period * 0.3
        """Timeout for the newest checkpoint to reach storage."""
        self.cancelled = min(1.0, grace_period / 20)
        """Timeout for the newest checkpoint of a cancelled gang to reach storage. Short, as a user may wait."""
        self.results = grace_period / 10
        """Timeout for submitted results to reach storage."""
        self.stop = min(1.5, grace_period / 10)
        """Timeout for ranks to end after the stop order. Then agents kill the remaining ranks.

        Exit functions of ranks that have failed by themselves have a part of this timeout (`rank.ending.EXIT_TIME`).
        """
        self.close = grace_period / 2
        """Additional timeout for rank 0 to end after the last attempt's stop order, if it has observers to close."""
        self.all_stopped = grace_period * 0.75
        """Timeout for all ranks' exits. Then silent nodes count as lost. Longer than every rank's own timeout."""
        self.upload = grace_period / 2
        """Timeout for unfinished checkpoint transfers to the driver when the last attempt ends."""
        self.dismiss = grace_period / 4
        """Timeout for agents' cleanup after the last rank."""


@dataclass
class StopRequest:
    """Request that the gang save a checkpoint, then end or go on without a worker."""

    reason: str
    ends_gang: bool
    """False if the gang continues without the departing worker."""
    deadlines: Deadlines
    is_workers: bool = False
    """True if a departing worker requested the stop."""
    is_awaited: bool = False
    """True if a user waits for the end. If no rank has ever called `should_stop`, all ranks end at once."""
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)
    deadline: float = field(init=False)
    """Time at which the driver ends ranks that have not stopped, in seconds on the clock."""
    heeding: set[int] = field(default_factory=set, init=False)
    """Ranks whose program handles the request's signal."""
    has_signalled: bool = field(default=False, init=False)
    """True after the driver has passed the signal to the ranks' program, which ends itself within the grace period."""

    def __post_init__(self) -> None:
        self.deadline = self.clock() + self.deadlines.grace_period

    @property
    def signal(self) -> int:
        """The signal that has caused the request, as far as programs see it."""
        return SIGINT if self.is_awaited else SIGTERM

    def has_been_obeyed(self, attempt: Attempt) -> bool:
        """Return True if the grace period is over, or all ranks have ended whose program handles the signal."""
        return self.clock() >= self.deadline or attempt.exits.keys() >= self.heeding

    def explains(self, attempt: Attempt) -> bool:
        """Return True if the attempt has ended by the request: no rank has failed by itself, except by the signal."""
        if not attempt.has_own_failure:
            return True
        failure = attempt.root_failure().failure
        return self.has_signalled and (failure is None or failure.type_name in SIGNALS)
