"""Orders from driver and agent to a rank while it runs."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from flytekitplugins.daskpytorch.protocol.calls import CallOrder, EndCall
from flytekitplugins.daskpytorch.protocol.checkpoint_file import CheckpointFile
from flytekitplugins.daskpytorch.protocol.payload import Address
from flytekitplugins.daskpytorch.protocol.questions import Answer, Ask
from flytekitplugins.daskpytorch.protocol.sharded import ShardedCheckpoint
from flytekitplugins.daskpytorch.records import LogRecord, SavedCheckpoint

# ---- From the driver ...


@dataclass(frozen=True)
class Release:
    """Order to a rank: unblock `should_stop`, and return True from all calls after call number `last_call`."""

    last_call: int
    """Number of the last call of `should_stop` that returns False. Later calls return True."""
    signal: int | None = None
    """Signal for the rank's program, which has never called `should_stop`. None: no signal."""


@dataclass(frozen=True)
class Settled:
    """Notice to ranks: the driver has committed a sharded checkpoint or given it up.

    The ranks may write the next one.
    """

    number: int
    """Number of the attempt's call of `save_sharded`, from 0."""


@dataclass(frozen=True)
class Kept:
    """Notice to ranks: the checkpoints that the gang keeps now."""

    checkpoints: Sequence[SavedCheckpoint]


@dataclass(frozen=True)
class Evaluated:
    """Metrics of evaluations, for the trackers in rank 0."""

    records: Sequence[LogRecord]


@dataclass(frozen=True)
class Leave:
    """Order to a rank: end, since the functions of all ranks have returned."""


# ---- ... and from the agent


class Brought(enum.Enum):
    """Kind of object that an agent brings to its node."""

    START = "the checkpoint from which an attempt starts"
    ARGUMENTS = "the large arguments of a call"
    CHECKPOINT = "the checkpoint that a rank has asked for"


@dataclass(frozen=True)
class Arrived:
    """Notice to ranks: a checkpoint, or a call's large arguments, has arrived on their node, or will not arrive."""

    attempt: int
    what: Brought
    number: int = 0
    """Number of a staying gang's call, or of the rank's question. 0 for all else."""
    value: CheckpointFile | ShardedCheckpoint | Address | None = None
    """A checkpoint in the agent's folder, a sharded checkpoint in storage, or the arguments' shared memory. None if no
    checkpoint has the wanted step."""
    failure: str | None = None
    """Reason why the object will not arrive. None without a failure."""


@dataclass(frozen=True)
class Quit:
    """Order to a rank: exit at once."""

    reason: str | None
    """Reason to stop a training that did not fail, for observers in rank 0. None after a failure."""
    grace: float
    """Grace period in seconds, after which the agent kills the rank."""


OrderToAll = Ask | Answer | Release | Settled | Kept | Evaluated | Leave | CallOrder | EndCall
OrderToRank = OrderToAll | Arrived
"""All orders after which the rank goes on."""
Order = OrderToRank | Quit
