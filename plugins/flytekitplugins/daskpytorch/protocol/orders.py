"""Orders from driver and agent to a rank while it runs."""

from collections.abc import Sequence
from dataclasses import dataclass

from flytekitplugins.daskpytorch.protocol.calls import CallOrder, EndCall
from flytekitplugins.daskpytorch.protocol.questions import Answer, Ask
from flytekitplugins.daskpytorch.records import LogRecord, SavedCheckpoint


@dataclass(frozen=True)
class Release:
    """Order to a rank: unblock `should_stop`, and return True from all calls after call number `last_call`."""

    last_call: int
    """Number of the last call of `should_stop` that returns False. Later calls return True."""
    signal: int | None = None
    """Signal for the rank's program, which has never called `should_stop`. None: no signal."""


@dataclass(frozen=True)
class Kept:
    """Notice to ranks: the checkpoints that the gang keeps now, and the newest save that is over."""

    checkpoints: Sequence[SavedCheckpoint]
    settled: int = -1
    """Number of the attempt's newest call of `save_sharded` whose checkpoint the driver has committed or given up, from
    0. The ranks may write the next one. -1: none."""


@dataclass(frozen=True)
class Leave:
    """Order to a rank: end, since the functions of all ranks have returned."""


@dataclass(frozen=True)
class Quit:
    """Order to a rank: exit at once."""

    reason: str | None
    """Reason to stop a training that did not fail, for observers in rank 0. None after a failure."""
    grace: float
    """Grace period in seconds, after which the agent kills the rank."""


OrderToAll = Ask | Answer | Release | Kept | LogRecord | Leave | CallOrder | EndCall
"""All orders after which the rank goes on. `LogRecord`: metrics of an evaluation, for the trackers in rank 0."""
Order = OrderToAll | Quit
