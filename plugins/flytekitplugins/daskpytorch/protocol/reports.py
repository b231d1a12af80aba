"""What a rank reports to the driver. Its agent gathers reports and passes them on unopened, all but signs of life."""

import contextlib
import io
import pickle
import select
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from flytekitplugins.daskpytorch.context import LogRecord
from flytekitplugins.daskpytorch.goodput import RankUsage
from flytekitplugins.daskpytorch.protocol.checkpoint_file import CheckpointFile
from flytekitplugins.daskpytorch.protocol.collectives import Recalled
from flytekitplugins.daskpytorch.protocol.failure import Failure
from flytekitplugins.daskpytorch.protocol.result_frames import Piece
from flytekitplugins.daskpytorch.protocol.sharded import WrittenShards

NUM_MOVES = struct.Struct("!Q")
"""How many signs of life a rank has given so far: the one thing that its agent reads, to say it in its heartbeat. It is
shorter than any pickle of a report."""
MAX_TOGETHER = 1 << 14
"""Bytes of reports in one message; more would make what waits in the driver large, and hardly any cheaper."""


@dataclass(frozen=True)
class Ready:
    """It has joined the process group."""


@dataclass(frozen=True)
class Saved:
    """It has written a checkpoint, which its agent can send."""

    file: CheckpointFile


@dataclass(frozen=True)
class ShardsWritten:
    """It has written its part of a sharded checkpoint, which is one once all ranks have."""

    shards: WrittenShards


@dataclass(frozen=True)
class ShardsNotWritten:
    """It has given up writing its part of a sharded checkpoint, for this reason."""

    number: int
    """As in `WrittenShards`."""
    step: int
    reason: str


@dataclass(frozen=True)
class Wanted:
    """It waits for a checkpoint to load, which `orders.Arrived` tells it of."""

    number: int
    """Which of its requests this is: all ranks get the same for the same number, as rank 0 decides."""
    step: int | None
    """None: the best."""
    is_sharded: bool = False


@dataclass(frozen=True)
class Used:
    """What it uses of its machine, and what it has done so far."""

    usage: RankUsage


@dataclass(frozen=True)
class Spent:
    """What its time has gone into since it was ready."""

    seconds: Mapping[str, float]
    """As of `RankUsage`."""
    step: int | None = None
    """Until a checkpoint of this step held its work; None: until now."""
    is_last: bool = False
    """Its function has returned."""


@dataclass(frozen=True)
class GoodputWanted:
    """It waits to hear where the gang's time has gone (`orders.Accounted`)."""

    number: int
    """Which of its requests this is: all ranks get the same for the same number."""


@dataclass(frozen=True)
class Hint:
    """Something looks forgotten; said once for each kind."""

    kind: str
    text: str
    """What the rank does, or has done."""


@dataclass(frozen=True)
class Noted:
    """Something that a user should read."""

    text: str
    """What the rank has done, or does."""


@dataclass(frozen=True)
class Held:
    """It holds back its next call of `should_stop`, after so many; asked by `Hold`."""

    num_calls: int


@dataclass(frozen=True)
class Located:
    """Where it is; asked by `Locate`."""

    num_collectives: int
    """How many it has entered."""
    stacks: str
    """What all of its threads do."""
    num_moves: int
    """How many signs of life it has given so far."""
    look: int = 0
    """The number in the order `Locate`."""
    num_bytes: int | None = None
    """Bytes that it has received by TCP; None while any are on their way, or if nobody knows."""


@dataclass(frozen=True)
class Remembered:
    """Its last collectives; what follows `Located`."""

    recalled: Recalled | None
    """None where torch does not record them."""


@dataclass(frozen=True)
class Stands:
    """The rank has begun to stand still (no new collective for seconds), or goes on again."""

    is_still: bool


@dataclass(frozen=True)
class FolderWanted:
    """The folder of its task's results is to be there when the task ends."""


@dataclass(frozen=True)
class StoppedEarly:
    """Its function returned because `should_stop` had turned true."""


@dataclass(frozen=True)
class AtPrompt:
    """Its debugger asks for the terminal, which `Prompt` grants."""


@dataclass(frozen=True)
class LeftPrompt:
    """Its debugger goes on."""

    steps: bool
    """It is about to ask again."""


@dataclass(frozen=True)
class Waits:
    """It waits for an editor's debugger, in which it may stand still as long as anybody likes."""

    text: str
    """Where."""


@dataclass(frozen=True)
class Returned:
    """Its function returned."""

    value: object = None
    """What the driver needs of the value; None also where that went in pieces before."""


ShortReport = (
    Ready
    | LogRecord
    | Saved
    | ShardsWritten
    | ShardsNotWritten
    | Wanted
    | Used
    | Spent
    | GoodputWanted
    | Hint
    | Noted
    | Held
    | Located
    | Remembered
    | Stands
    | FolderWanted
    | StoppedEarly
    | AtPrompt
    | LeftPrompt
    | Waits
    | Returned
    | Failure
)
"""A `LogRecord` is a call of `log`, a `Failure` the end of the function by an exception."""
Report = ShortReport | Piece


@dataclass
class Gathered:
    """What has come from a rank since its agent last looked."""

    messages: list[bytes] = field(default_factory=list)
    """Reports, pickled, to be passed on in order."""
    num_moves: int | None = None
    """Signs of life so far, if the rank has said so."""

    def add(self, report: bytes) -> None:
        """Take in the next report; small ones go together: those that come fast would cost a message each."""
        if len(report) == NUM_MOVES.size:
            (self.num_moves,) = NUM_MOVES.unpack(report)
        elif self.messages and len(report) < MAX_TOGETHER:
            self.messages[-1] += report
        else:
            self.messages.append(report)

    @property
    def is_full(self) -> bool:
        """Whether to pass it on first."""
        return bool(self.messages) and (len(self.messages) > 1 or len(self.messages[0]) >= MAX_TOGETHER)


def gather(channel: Connection) -> Gathered:
    """What has come from a rank; waits for the first report.

    Nothing waits for others to come, and so nothing is lost with the rank.

    Raises:
        EOFError, OSError: The channel is closed, and nothing is left in it.
    """
    gathered = Gathered()
    gathered.add(channel.recv_bytes())
    look = select.poll()
    look.register(channel, select.POLLIN)
    with contextlib.suppress(EOFError, OSError):  # the next call says so
        while not gathered.is_full and look.poll(0):
            gathered.add(channel.recv_bytes())
    return gathered


def unpack(reports: bytes) -> Iterator[Report]:
    """The reports that were gathered; their pickles lie one after the other, and records together are one."""
    stream = io.BytesIO(reports)
    while stream.tell() < len(reports):
        report = pickle.load(stream)  # noqa: S301 - from our own rank, by its agent's connection
        yield from report if isinstance(report, list) else [report]
