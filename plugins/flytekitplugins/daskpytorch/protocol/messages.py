"""All messages between driver, agents and ranks. Imports neither Dask nor torch.

Questions travel as `Ask`, answers as `Answer`. The driver asks all ranks of an attempt, in `Tell`, and each rank
answers. A rank asks the driver, and all ranks of its node get the answer. The ranks' n-th questions of one kind have
the same answer. Answers that every attempt or call needs come unasked.
"""

import enum
import pickle
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flytekitplugins.daskpytorch.protocol.checkpoints import CheckpointFile, WrittenShards
from flytekitplugins.daskpytorch.protocol.code import Code
from flytekitplugins.daskpytorch.protocol.failure import Failure, Recalled
from flytekitplugins.daskpytorch.protocol.job import Job
from flytekitplugins.daskpytorch.protocol.payload import Address, Piece
from flytekitplugins.daskpytorch.protocol.placement import Node, Place
from flytekitplugins.daskpytorch.records import LogRecord, RankUsage, SavedCheckpoint

# ---- Calls of a gang that stays: orders, and the rank's report


@dataclass(frozen=True, kw_only=True)
class NextCall:
    """Order to a rank: call a function, and report how the call has ended."""

    number: int
    """Number of the call in its gang, from 1."""
    call: bytes = field(repr=False)
    """The pickled call. Empty if `large` has the call."""
    code: Code | None = field(default=None, repr=False)
    """The project's sources, if the driver has imported more modules since the gang's start. None otherwise."""
    large: Address | None = None
    """The driver's shared memory with a large call. None for a small call."""
    keeps: bool = False
    """True if the rank keeps the return value, under the call's number, instead of sending the value."""


@dataclass(frozen=True)
class EndCall:
    """Order to a rank that has halted (`Question.HALT`): end a call by `KeyboardInterrupt`, if the call still runs."""

    number: int
    """Number of the call."""
    at: int
    """Number of the collective after which the rank leaves the call."""


@dataclass(frozen=True)
class Forget:
    """Order to a rank: free the value that it has kept under the number of this call."""

    number: int


@dataclass(frozen=True)
class Finish:
    """Order to a rank: run no more calls and return, since the gang closes."""


CallOrder = NextCall | Forget | Finish
"""Orders that a rank's main thread follows, one after the other."""


@dataclass(frozen=True, kw_only=True)
class CallEnded:
    """Report that a call has returned or raised in the rank."""

    number: int
    value: bytes | None = field(default=None, repr=False)
    """Pickled return value. None if the value was sent in pieces, or the call has failed."""
    failure: Failure | None = None
    """The exception that the call has raised. None if the call has returned."""


# ---- Questions


class Question(enum.Enum):
    """Kind of a question. `about` and the answer are None if the kind names none."""

    STACKS = enum.auto()
    """Stacks and progress of a rank, for the driver. `about`: True if the rank also writes its stacks to its log.
    Answer: `Located`."""
    COLLECTIVES = enum.auto()
    """Newest collectives of a rank, for the driver. Answer: `Recalled`, or None if torch does not record them."""
    HOLD = enum.auto()
    """Order of the driver to block the next call of `should_stop`. `about`: signal that the driver may pass to the
    rank's program, or None. Answer: number of calls so far, and whether the program handles the signal."""
    HALT = enum.auto()
    """Order of the driver to halt in a call of a gang that stays. `about`: number of the call. Answer: number of the
    collective after which the rank can leave the call, or 0 if unknown."""
    GOODPUT = enum.auto()
    """Account of the gang's time, for a rank. Answer: `Goodput`."""
    CHECKPOINT = enum.auto()
    """Whole checkpoint that a rank needs on its node. `about`: its step, or None for the best. Answer:
    `CheckpointFile`, or None if there is no such checkpoint. Number 0, unasked: the attempt's start."""
    SHARDED = enum.auto()
    """Sharded checkpoint that a rank needs. `about` as above. Answer: `ShardedCheckpoint`, or None."""
    ARGUMENTS = enum.auto()
    """Large arguments of a call, which a rank needs on its node. Unasked. The number is that of a staying gang's call,
    else 0. Answer: `Address`."""


@dataclass(frozen=True)
class Ask:
    """A question of the driver to all ranks, or of a rank to the driver."""

    question: Question
    number: int
    """Number of the question, from 1. The driver counts all its questions of an attempt, a rank those of one kind. The
    answer repeats the number."""
    about: Any = None


@dataclass(frozen=True)
class Answer:
    """Answer to a question."""

    question: Question
    number: int
    value: Any
    failure: str | None = None
    """Reason why the value has not arrived on the rank's node. None without a failure."""


@dataclass(frozen=True)
class Located:
    """Where a rank is: the answer to `Question.STACKS`."""

    num_collectives: int
    """Number of collectives that the rank has entered."""
    stacks: str
    """Stacks of all threads of the rank."""
    num_moves: int
    """Number of the rank's signs of life so far."""


# ---- Reports from a rank to the driver, which its agent passes on without unpickling, except signs of life


NUM_MOVES = struct.Struct("!Q")
"""Format of a report with nothing but a rank's number of signs of life so far. Agents put the number into heartbeats,
and recognise the report by its size. All pickled reports are longer."""


@dataclass(frozen=True)
class Ready:
    """Report that the rank has joined the process group."""


@dataclass(frozen=True)
class Spent:
    """Account of the rank's time since the rank joined the process group."""

    seconds: Mapping[str, float]
    """Seconds of the rank's main thread by the field's name in `Goodput`, such as `stepping` or `saving`."""
    step: int | None = None
    """Step of the checkpoint whose save ends the account. None if the account lasts until this report."""
    is_last: bool = False
    """True if the rank's function has returned."""


@dataclass(frozen=True)
class Noted:
    """Note of a rank, which the driver shows to the user."""

    text: str
    """Text about the rank, which the driver shows after the words `rank N`."""
    hint: str = ""
    """Kind of a likely mistake in the function, of which the driver shows one note. Empty for any other note."""


@dataclass(frozen=True)
class Debugged:
    """Report that the rank is in a debugger, in which it cannot count as hung, or has left the debugger's prompt."""

    state: str = ""
    """Reason, which the driver shows after the words `rank N`. Empty: the rank has left the prompt."""
    folder: str | None = None
    """Folder of the rank's agent, in which the driver may attach its terminal. None: the driver must not."""
    needs_terminal: bool = False
    """True if the prompt waits for a terminal."""
    steps: bool = False
    """True if the rank that has left the prompt will show its next one soon, for example after `next`."""


@dataclass(frozen=True)
class Returned:
    """Report that the rank's function has returned."""

    value: object = None
    """Return value for the driver. None if the value was sent in pieces, or the training is unfinished."""
    stopped_early: bool = False
    """True if the rank's `should_stop` had returned True before the function returned."""


ShortReport = (
    Ready
    | LogRecord
    | CheckpointFile
    | WrittenShards
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
"""All reports but pieces of results. Some are records that other modules define:

- `LogRecord`: a call of `log`
- `CheckpointFile`: a whole checkpoint that the rank has written, and that its agent can send
- `WrittenShards`: the rank's shards of a sharded checkpoint, written or failed
- `RankUsage`: the rank's use of its machine, and its work so far
- `Ask`, `Answer`: a question to the driver, and the answer to the driver's
- `Recalled`: the rank's last collectives, before an abort, or before the rank leaves its peers
- `CallEnded`: the end of a staying gang's call
- `Failure`: an exception of the function
"""
Report = ShortReport | Piece


def unpack(data: bytes) -> list[Report]:
    """Return the reports in a message from a rank, which is the pickle of a report or of a list of log records."""
    reports = pickle.loads(data)  # noqa: S301 - from the gang's own rank, over its agent's connection
    return reports if isinstance(reports, list) else [reports]


# ---- Orders from driver and agent to a rank


@dataclass(frozen=True)
class Release:
    """Order to a rank: unblock `should_stop`, and return True from all calls after call number `last_call`."""

    last_call: int
    """Number of the last call of `should_stop` that returns False. Later calls return True."""
    signal: int | None = None
    """Signal for the rank's program, which has never called `should_stop`. None: no signal."""


@dataclass(frozen=True)
class Kept:
    """Notice to ranks: the checkpoints that the gang keeps now."""

    checkpoints: Sequence[SavedCheckpoint]


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


# ---- Between driver and agents


# ---- From the agent ...


@dataclass(frozen=True)
class Hello:
    """An agent's first message to the driver: the agent's node and port."""

    node: Node
    meets_at: tuple[str, int]
    """Host and port of the rendezvous store, if rank 0 runs on this node."""


@dataclass(frozen=True)
class Reported:
    """Pickled report of a rank, or list of its log records, which the agent passes on to the driver."""

    rank: int
    report: bytes


@dataclass(frozen=True)
class Lines:
    """Lines that a rank wrote to its standard output and error, as its agent sends them to the driver."""

    rank: int
    lines: list[str]


@dataclass(frozen=True)
class Exited:
    """The agent's report that the process of one of its ranks has ended."""

    rank: int
    exitcode: int
    stopped: bool
    """True if the agent had stopped the rank."""
    out_of_memory: bool
    log_tail: str
    time: float
    watchdog: str = ""
    """Log line in which torch's NCCL watchdog gave the reason to abort the rank. Empty for any other end."""
    log_folder: str = ""
    """Folder of the rank's log files on its machine. Empty without log files."""


@dataclass(frozen=True)
class Broken:
    """The agent's report of an error of its own, which ends its ranks, too."""

    traceback: str


@dataclass(frozen=True)
class Sent:
    """The agent's answer to `Fetch` without an upload: the file is in the driver's folder, or cannot be sent."""

    file: CheckpointFile
    failure: str | None = None
    """Reason why the agent cannot send the checkpoint. None: the driver's folder has a link to the file."""


@dataclass(frozen=True)
class Leaving:
    """The agent's report that its worker is closing, by order of the Dask scheduler or a signal."""


@dataclass(frozen=True)
class Stacks:
    """The agent's answer to `Dump`: the stack of a rank that has written it on a signal, since it did not answer."""

    rank: int
    text: str
    """Traceback of the rank's main thread, or the reason why the rank wrote none."""


FromAgent = Hello | Reported | Lines | Exited | Broken | Sent | Leaving | Stacks
"""All messages of an agent except its heartbeats."""


# ---- ... and to it


@dataclass(frozen=True)
class Start:
    """Order to an agent: start a rank for each place."""

    job: Job
    code: Code
    places: list[Place]


@dataclass(frozen=True)
class Stop:
    """Order to an agent: stop all its ranks, after a failure or because the training should end."""

    grace: float
    """Grace period in seconds, after which the agent kills the ranks."""
    main_grace: float
    """Grace period of rank 0 in seconds. Rank 0 may have trackers to close."""
    reason: str | None = None
    """Reason to stop a training that did not fail. None after a failure."""


@dataclass(frozen=True)
class Tell:
    """Order to an agent: pass `order` on to each of its ranks."""

    order: OrderToAll


@dataclass(frozen=True)
class Dump:
    """Order to an agent: signal ranks that do not answer, and send the stacks that the ranks then write to files."""

    ranks: list[int]


@dataclass(frozen=True)
class Fetch:
    """Order to an agent: upload a checkpoint of one of its ranks to the driver, over a separate connection."""

    file: CheckpointFile


@dataclass(frozen=True)
class Bring:
    """Order to an agent: download the checkpoint or the arguments in an answer, and give its ranks the answer then."""

    answer: Answer
    attempt: int
    """Number of the attempt whose ranks get the answer."""


@dataclass(frozen=True)
class Close:
    """Order to an agent: end, since the gang is over."""


ToAgent = Start | Stop | Tell | Dump | Fetch | Bring | Close


# ---- Over connections of their own, in pieces that follow


@dataclass(frozen=True)
class Upload:
    """The agent's announcement of a checkpoint, whose bytes follow on the same connection."""

    file: CheckpointFile


@dataclass(frozen=True)
class Download:
    """The agent's request to the driver for a file, whose bytes the driver sends on the same connection."""

    file: CheckpointFile | None
    """The checkpoint. None: the large arguments of the user's call."""
