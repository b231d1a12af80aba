"""What may happen to a gang: all that its brain ever hears. Runs in the driver."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flytekitplugins.daskpytorch.driver.received import Part
from flytekitplugins.daskpytorch.protocol.checkpoint_file import CheckpointFile
from flytekitplugins.daskpytorch.protocol.framing import Connection
from flytekitplugins.daskpytorch.protocol.messages import FromAgent
from flytekitplugins.daskpytorch.protocol.reports import ShortReport


@dataclass(frozen=True)
class Said:
    """An agent, or a worker that stays for many gangs, has said something."""

    connection: Connection
    message: FromAgent


@dataclass(frozen=True)
class RankSaid:
    """Reports of one rank have come by its agent, in order; pieces of results are kept already."""

    connection: Connection
    rank: int
    reports: Sequence[ShortReport | Part]


@dataclass(frozen=True)
class Beaten:
    """Agents have given signs of life of their ranks."""

    newest: Mapping[Connection, bytes]
    """Their newest heartbeats, unopened."""


@dataclass(frozen=True)
class Gone:
    """A connection has ended."""

    connection: Connection


@dataclass(frozen=True)
class Uploaded:
    """A checkpoint has arrived, or has not, for this reason."""

    file: CheckpointFile
    error: Exception | None


@dataclass(frozen=True)
class Committed:
    """A sharded checkpoint has been committed, or will not be, for this reason."""

    attempt: int
    number: int
    """Which of the attempt's saves it is."""
    step: int
    error: Exception | None


@dataclass(frozen=True)
class NotLaunched:
    """An agent could not be started, or ended in an error."""

    worker: str
    error: Exception
    launch: int
    """The how manieth time its worker was asked."""


@dataclass(frozen=True)
class Preempted:
    """The task is to end, and to save a checkpoint before."""

    reason: str
    is_awaited: bool = False
    """Somebody waits for the end: ranks that never ask whether they should stop are not waited for."""


@dataclass(frozen=True)
class Cancelled:
    """Nobody wants the results any more."""


@dataclass(frozen=True)
class Interrupted:
    """Ctrl-C was pressed while a rank's debugger had the terminal."""


Event = Said | RankSaid | Beaten | Gone | Uploaded | Committed | NotLaunched | Preempted | Cancelled | Interrupted
