"""Reports from a rank to the driver. The rank's agent passes them on without unpickling, except signs of life."""

import contextlib
import io
import pickle
import select
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from flytekitplugins.daskpytorch.protocol.checkpoint_file import CheckpointFile
from flytekitplugins.daskpytorch.protocol.failure import Failure, Recalled
from flytekitplugins.daskpytorch.protocol.payload import Piece
from flytekitplugins.daskpytorch.protocol.sharded import WrittenShards
from flytekitplugins.daskpytorch.records import LogRecord, RankUsage

NUM_MOVES = struct.Struct("!Q")
"""A rank's number of signs of life so far. Its agent reads this report for the heartbeat, and recognises the report by
its size. All pickled reports are longer."""
MAX_TOGETHER = 1 << 14
"""Maximum number of bytes of small reports in one message. Larger messages would fill the driver's queues and save
little time."""


@dataclass(frozen=True)
class Ready:
    """The rank has joined the process group."""


@dataclass(frozen=True)
class ShardsNotWritten:
    """The rank failed to write its shards of a sharded checkpoint."""

    number: int
    """Number of the checkpoint, as in `WrittenShards`."""
    step: int
    reason: str


@dataclass(frozen=True)
class Wanted:
    """The rank waits for a checkpoint to load, until `orders.Arrived`."""

    number: int
    """Number of the rank's request, from 1. All ranks get the checkpoint of rank 0's request with that number."""
    step: int | None
    """Step of the checkpoint. None means the best checkpoint."""
    is_sharded: bool = False


@dataclass(frozen=True)
class Spent:
    """Account of the rank's time since `Ready`."""

    seconds: Mapping[str, float]
    """Seconds by the field's name in `Goodput`, as in `RankUsage.seconds`."""
    step: int | None = None
    """Step of the checkpoint at which the account ends. None if the account ends now."""
    is_last: bool = False
    """True if the rank's function has returned."""


@dataclass(frozen=True)
class GoodputWanted:
    """The rank waits for the gang's goodput, until `orders.Accounted`."""

    number: int
    """Number of the rank's request. All ranks get the same goodput for the same number."""


@dataclass(frozen=True)
class Hint:
    """Advice about a call that the user's code seems to have forgotten. Shown once for each kind."""

    kind: str
    text: str
    """Description of the rank's action."""


@dataclass(frozen=True)
class Noted:
    """A note for the user's log."""

    text: str
    """Description of the rank's action."""


@dataclass(frozen=True)
class Held:
    """Answer to `Hold`: the rank blocks its next call of `should_stop`."""

    num_calls: int
    """Number of calls so far."""


@dataclass(frozen=True)
class Located:
    """Answer to `Locate`: the rank's stacks and progress."""

    num_collectives: int
    """Number of collectives that the rank has entered."""
    stacks: str
    """Stacks of all threads of the rank."""
    num_moves: int
    """Number of the rank's signs of life so far."""
    look: int
    """`look` of the order `Locate`."""
    num_bytes: int | None = None
    """Bytes that the rank has received over TCP. None while its sockets hold unread or unsent bytes, or if unknown."""


@dataclass(frozen=True)
class Remembered:
    """The rank's last collectives, sent after `Located`."""

    recalled: Recalled | None
    """The collectives. None if torch does not record them."""


@dataclass(frozen=True)
class Stands:
    """A change: the rank now stands still, or goes on."""

    is_still: bool
    """True if the rank has entered no collective, and given no sign of life, for seconds."""


@dataclass(frozen=True)
class FolderWanted:
    """The rank asks the driver to create the folder of the task's results."""


@dataclass(frozen=True)
class AtPrompt:
    """The rank's debugger waits for the terminal, until `Prompt`."""


@dataclass(frozen=True)
class LeftPrompt:
    """The rank's debugger has left its prompt."""

    steps: bool
    """True if the debugger will need the terminal again soon, for example after `next`."""


@dataclass(frozen=True)
class Waits:
    """The rank waits for an editor's debugger, and can no longer count as hung."""

    text: str
    """Note for the user with the host and port to attach to."""


@dataclass(frozen=True)
class Returned:
    """The rank's function returned."""

    value: object = None
    """Return value for the driver. None also for a value sent in pieces, and for an unfinished training."""
    stopped_early: bool = False
    """True if `should_stop` had returned True before."""


ShortReport = (
    Ready
    | LogRecord
    | CheckpointFile
    | WrittenShards
    | ShardsNotWritten
    | Wanted
    | RankUsage
    | Spent
    | GoodputWanted
    | Hint
    | Noted
    | Held
    | Located
    | Remembered
    | Stands
    | FolderWanted
    | AtPrompt
    | LeftPrompt
    | Waits
    | Returned
    | Failure
)
"""All reports but pieces of results. Some are records that other modules define:

- `LogRecord`: a call of `log`
- `CheckpointFile`: a whole checkpoint that the rank has written, and that its agent can send
- `WrittenShards`: the rank's written shards of a sharded checkpoint
- `RankUsage`: the rank's use of its machine, and its work so far
- `Failure`: an exception of the function
"""
Report = ShortReport | Piece


@dataclass
class Gathered:
    """A rank's reports that its agent passes on together."""

    messages: list[bytes] = field(default_factory=list)
    """Pickled reports, oldest first. Each item is one message to the driver."""
    num_moves: int | None = None
    """Number of signs of life so far. None if unknown."""

    def add(self, report: bytes) -> None:
        """Add the next report. Small reports share a message, which costs less for frequent reports."""
        if len(report) == NUM_MOVES.size:
            (self.num_moves,) = NUM_MOVES.unpack(report)
        elif self.messages and len(report) < MAX_TOGETHER:
            self.messages[-1] += report
        else:
            self.messages.append(report)

    @property
    def is_full(self) -> bool:
        """True if the agent must send the messages before another `add`."""
        return bool(self.messages) and (len(self.messages) > 1 or len(self.messages[0]) >= MAX_TOGETHER)


def gather(channel: Connection) -> Gathered:
    """Wait for a rank's next report, then gather all further reports that have arrived.

    Raises:
        EOFError, OSError: The channel is closed and empty.
    """
    gathered = Gathered()
    gathered.add(channel.recv_bytes())
    look = select.poll()
    look.register(channel, select.POLLIN)
    with contextlib.suppress(EOFError, OSError):  # the next call raises the error
        while not gathered.is_full and look.poll(0):
            gathered.add(channel.recv_bytes())
    return gathered


def unpack(reports: bytes) -> Iterator[Report]:
    """Yield the reports in a message. A message is a row of pickles, and a pickle may hold a list of log records."""
    stream = io.BytesIO(reports)
    while stream.tell() < len(reports):
        report = pickle.load(stream)  # noqa: S301 - from the gang's own rank, over its agent's connection
        yield from report if isinstance(report, list) else [report]
