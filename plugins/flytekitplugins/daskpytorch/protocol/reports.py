"""Reports from a rank to the driver. The rank's agent passes them on without unpickling, except signs of life."""

import pickle
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from flytekitplugins.daskpytorch.protocol.calls import CallEnded
from flytekitplugins.daskpytorch.protocol.checkpoint_file import CheckpointFile
from flytekitplugins.daskpytorch.protocol.failure import Failure, Recalled
from flytekitplugins.daskpytorch.protocol.payload import Piece
from flytekitplugins.daskpytorch.protocol.questions import Answer, Ask
from flytekitplugins.daskpytorch.protocol.sharded import WrittenShards
from flytekitplugins.daskpytorch.records import LogRecord, RankUsage

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
