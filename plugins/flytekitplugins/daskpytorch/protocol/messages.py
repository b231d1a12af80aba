"""All messages between driver, agents and ranks. Imports neither Dask nor torch.

Questions travel as `Ask`, answers as `Answer`. The driver asks all ranks of an attempt, in `Tell`. The ranks' n-th
questions have the same answer, which all ranks of a node get.
"""

import enum
import pickle
import struct
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flytekitplugins.daskpytorch.protocol.checkpoints import CheckpointEntry, Written
from flytekitplugins.daskpytorch.protocol.code import Code
from flytekitplugins.daskpytorch.protocol.failure import Failure, RankExit, Recalled
from flytekitplugins.daskpytorch.protocol.job import Job, LargeCall
from flytekitplugins.daskpytorch.protocol.placement import Node, Place
from flytekitplugins.daskpytorch.records import Goodput, LogRecord, RankUsage, SavedCheckpoint

# ---- Calls of a gang that stays: orders, and the rank's report


@dataclass(frozen=True, kw_only=True)
class NextCall:
    number: int
    call: bytes | LargeCall = field(repr=False)
    keeps: bool = False
    """The rank keeps the return value under the call's number, instead of sending it."""


@dataclass(frozen=True)
class Forget:
    number: int


@dataclass(frozen=True)
class Finish:
    """The gang closes."""


CallOrder = NextCall | Forget | Finish


@dataclass(frozen=True, kw_only=True)
class CallEnded:
    number: int
    value: bytes | None = field(default=None, repr=False)
    """None if sent in pieces, or after a failure."""
    failure: Failure | None = None


# ---- Questions


class Question(enum.Enum):
    """Questions of the driver to all ranks (STACKS to HOLD), and of ranks.

    `about` and the answer are None if not named.
    """

    STACKS = enum.auto()
    """`about`: True if the rank also writes its stacks to its log. Answer: `Located`."""
    COLLECTIVES = enum.auto()
    """Answer: `Recalled` with the newest ones, or None if torch does not record them."""
    HOLD = enum.auto()
    """Ranks block in the next `should_stop`. `about`: signal that may be passed to the rank's program, or None. Answer:
    number of calls so far, and whether the program handles the signal."""
    CHECKPOINT = enum.auto()
    """`about`: whether it is sharded, and its step, or None for the best. Answer: `CheckpointEntry`, whose file the
    driver lends, or None."""


@dataclass(frozen=True)
class Ask:
    question: Question
    number: int
    """Repeated by the answer. Driver and rank count their own questions of an attempt from 1."""
    about: Any = None


@dataclass(frozen=True)
class Answer:
    number: int
    value: Any


@dataclass(frozen=True)
class Located:
    stacks: str
    num_moves: int


# ---- Reports from a rank to the driver, which its agent passes on without unpickling, except signs of life


NUM_MOVES = struct.Struct("!Q")
"""A report with nothing but the number of signs of life, known to agents by its size: all pickled reports are
longer."""


@dataclass(frozen=True)
class Ready:
    """The rank has joined the process group."""


@dataclass(frozen=True)
class Spent:
    seconds: Mapping[str, float]
    """Keys are names of `Goodput`'s fields."""
    step: int | None = None
    """Step of the checkpoint whose save ends the account, or None if this report does."""
    is_last: bool = False


@dataclass(frozen=True)
class Noted:
    text: str
    adapts: bool = False
    """After a lack of memory, the next attempt takes less."""


@dataclass(frozen=True)
class Debugged:
    """The rank is in a debugger, in which it cannot count as hung, or has left the prompt."""

    state: str = ""
    """Reason after the words `rank N`, or empty if the rank has left the prompt."""
    folder: str | None = None
    """The agent's folder if the driver may attach its terminal there."""
    needs_terminal: bool = False


@dataclass(frozen=True)
class Returned:
    value: object = None
    """None if sent in pieces, or if the training is unfinished."""
    stopped_early: bool = False


ShortReport = (
    Ready
    | LogRecord
    | Written
    | RankUsage
    | Spent
    | Ask
    | Answer
    | Noted
    | Recalled
    | Debugged
    | Returned
    | CallEnded
    | Failure
)
"""All reports but pieces of results. `Recalled` comes before an abort, or before the rank leaves its peers."""


# ---- Large return values and submitted files, which the driver writes to files

PIECE_SIZE = 1 << 20
"""Bytes. An agent relays a piece in milliseconds, which delays other ranks and heartbeats only briefly."""
SMALL_SIZE = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A value's pieces arrive in order."""

    path: str | None
    """Path in the results' folder (empty if only the task's folder must exist), or None for a return value."""
    file: str
    """Name of the value's file in a folder of the driver."""
    data: bytes
    is_last: bool


class PieceWriter:
    """File that passes what is written to `send`, in pieces."""

    def __init__(self, path: str | None, send: Callable[[Piece], object]) -> None:
        self._path, self._send, self._name = path, send, uuid.uuid4().hex
        self._has_sent = False
        self._rest = bytearray()

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        if len(self._rest) + len(view) <= PIECE_SIZE:
            self._rest += view
            return len(view)
        for part in (memoryview(self._rest), view):
            for start in range(0, len(part), PIECE_SIZE):
                self._put(part[start : start + PIECE_SIZE])
        self._rest = bytearray()
        return len(view)

    def end(self) -> bytes | None:
        """Send the last piece, or return the bytes of a small return value."""
        if self._path is None and not self._has_sent and len(self._rest) <= SMALL_SIZE:
            return bytes(self._rest)
        self._put(memoryview(self._rest), is_last=True)
        return None

    def _put(self, data: memoryview, *, is_last: bool = False) -> None:
        self._send(Piece(path=self._path, file=self._name, data=bytes(data), is_last=is_last))
        self._has_sent = True


Report = ShortReport | Piece


def unpack(data: bytes) -> list[Report]:
    reports = pickle.loads(data)  # noqa: S301 - from the gang's own rank, over its agent's connection
    return reports if isinstance(reports, list) else [reports]


# ---- Orders from driver and agent to a rank


@dataclass(frozen=True)
class Release:
    """Unblocks `should_stop`, whose later calls than `last_call` return True."""

    last_call: int
    signal: int | None = None
    """Signal for a program that has never called `should_stop`."""


@dataclass(frozen=True)
class Kept:
    checkpoints: Sequence[SavedCheckpoint]


@dataclass(frozen=True)
class Leave:
    """The rank ends, since the functions of all ranks have returned."""


@dataclass(frozen=True)
class Quit:
    reason: str | None
    """Reason to stop a training that did not fail, or None after a failure."""
    grace: float
    """Seconds after which the agent kills the rank."""


OrderToAll = Ask | Answer | Release | Kept | LogRecord | Goodput | Leave | CallOrder
"""For rank 0's trackers: `LogRecord`, the metrics of an evaluation, and `Goodput`, before `Leave`."""
Order = OrderToAll | Quit


# ---- Between driver and agents


# ---- From the agent ...


@dataclass(frozen=True)
class Hello:
    node: Node
    meets_at: tuple[str, int]
    """Host and port of the rendezvous store, if rank 0 runs on this node."""


@dataclass(frozen=True)
class Reported:
    """A rank's pickled report, or list of log records, which its agent has not opened."""

    rank: int
    report: bytes


@dataclass(frozen=True)
class Beat:
    """The agent lives."""

    num_moves: Mapping[int, int]
    """Number of signs of life of each rank that gives some."""


@dataclass(frozen=True)
class Lines:
    rank: int
    lines: list[str]


@dataclass(frozen=True)
class Broken:
    traceback: str


@dataclass(frozen=True)
class Leaving:
    """The agent's worker closes, by order of the Dask scheduler or a signal."""


FromAgent = Hello | Beat | Reported | Lines | RankExit | Broken | Leaving


# ---- ... and to it


@dataclass(frozen=True)
class Start:
    job: Job
    code: Code
    places: list[Place]


@dataclass(frozen=True)
class Stop:
    grace: float
    main_grace: float
    """Seconds for rank 0, which may have trackers to close."""
    reason: str | None = None


@dataclass(frozen=True)
class Tell:
    order: OrderToAll


@dataclass(frozen=True)
class Close:
    """The gang is over."""


ToAgent = Start | Stop | Tell | Close


# ---- From ranks, over connections of their own, with a file's bytes

CALL = "call"
"""Name by which ranks download a large call."""


@dataclass(frozen=True)
class Upload:
    """Comes before the file's bytes, after which the driver sends None, or the reason of a refusal."""

    file: CheckpointEntry


@dataclass(frozen=True)
class Download:
    """The driver then sends None and the file's bytes, or the reason of a refusal."""

    name: str
    """Name of a lent checkpoint's file, or `CALL`."""
