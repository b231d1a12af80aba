"""A part of a gang's driver: one feature in one file, with its own record. Runs in the gang's thread.

The core knows workers, attempts, exits, results, failures and the request to stop, and asks its parts by the methods of
`Part`. The core imports no part, and no part imports another: what a part needs of another is a question of the core.

    agents, ranks ──▶ GangState (record) ──▶ Brain (decision) ──▶ agents
                          │   ▲                  │   ▲
           take, begin, ..▼   │ report, blocks   ▼   │ orders, ends, blocks, due
                          └──────────── parts ───────┘
"""

import enum
from typing import Literal

from flytekitplugins.daskpytorch.driver.agents import Peer
from flytekitplugins.daskpytorch.driver.attempt import Attempt
from flytekitplugins.daskpytorch.protocol.checkpoints import CheckpointEntry
from flytekitplugins.daskpytorch.protocol.failure import Failure
from flytekitplugins.daskpytorch.protocol.job import Job

ANSWER_TIME = 0.4
"""Seconds for the ranks' answers to a question about a failure or a hang. Then the driver goes on."""
Stage = Literal["gathering", "starting", "training", "stopping", "settling"]
"""Workers are awaited, ranks start, rank 0 has joined, ranks must end, all ranks have ended."""


class Moment(enum.Enum):
    """Decisions of the core that a part may put off by `Part.blocks`."""

    LATE = "ranks that have not joined the process group count as late"
    HUNG = "silent ranks count as hung"
    STOP = "the ranks of a failed attempt are stopped"
    CHOICE = "ranks get the best checkpoint"
    LEAVE = "ranks leave, as the functions of all ranks have returned"


class Part:
    """Methods do nothing by default."""

    takes: tuple[type, ...] = ()
    """Types of reports for `take`."""

    def enter(self, stage: Stage) -> None:
        """Called at a new stage of the gang."""

    def equip(self, job: Job) -> Job:
        """Return the job of the next attempt's ranks, with this part's additions."""
        return job

    def begin(self, attempt: Attempt) -> None:
        """Called when the ranks of an attempt were told to start."""

    def take(self, peer: Peer, attempt: Attempt, rank: int, report: object) -> None:
        """Record a rank's report, of a type in `takes`, in the present attempt."""

    def rank_over(self, attempt: Attempt, rank: int, failure: Failure | None) -> None:
        """Called when a rank has failed, or when it has ended or is at rest (`failure`: None)."""

    def note_kept(self, entry: CheckpointEntry) -> None:
        """Called when a checkpoint is safe, before an older one may be deleted."""

    def note_evaluated(self) -> None:
        """Called when an evaluation has ended: kept checkpoints and their metrics may have changed."""

    def orders(self, now: float) -> None:
        """Send the orders that are due, before each decision of the core."""

    def ends(self, attempt: Attempt) -> bool | None:
        """True: the ranks of a healthy attempt must be stopped. False: not. None: another part decides.

        Sets `attempt.ended_for` if the gang shall go on with another attempt.
        """
        return None

    def due(self, attempt: Attempt) -> float | None:
        """Return when (driver's clock) this part next needs a decision without an event."""
        return None

    def blocks(self, moment: Moment) -> bool:
        return False

    def newest_step(self) -> int | None:
        """Return the step from which the next attempt would start."""
        return None

    def settle(self, *, is_last: bool) -> None:
        """Called when an attempt's ranks have ended. `is_last`: no other attempt seems to follow."""

    def restart(self, number: int) -> None:
        """Called when the gang goes on with attempt `number`."""

    def close(self) -> None:
        """Begin nothing new, as the gang must end. Called from the caller's side, and again at the end."""

    def farewell(self, timeout: float) -> str:
        """Store what the next attempt needs, within `timeout` seconds. Return the end of the error's text."""
        return ""
