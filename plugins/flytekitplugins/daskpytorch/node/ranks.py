"""An agent's record of a rank: channel, lines of output, and stacks. Runs in agents."""

import codecs
import contextlib
import os
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Channel
from pathlib import Path

from flytekitplugins.daskpytorch.protocol import orders
from flytekitplugins.daskpytorch.protocol.failure import is_of_watchdog
from flytekitplugins.daskpytorch.protocol.placement import Place

TAIL_LINES = 40
"""Maximum number of lines of a rank's log in an error."""
TAIL_SIZE = 16 << 10
"""Maximum number of characters of a rank's log in an error."""
MAX_LINE = 64 << 10
"""Maximum number of characters of a line. A longer line becomes several lines of this size."""


class Lines:
    """Splits a stream of bytes into lines, in bounded memory."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._unfinished = ""
        """Start of the last line, whose end has not arrived."""

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that end in these bytes, without blank lines. Empty `data` ends the stream."""
        # Carriage returns end lines, too: each state of a progress bar becomes a line.
        text = self._decoder.decode(data, final=not data).replace("\r", "\n")
        *lines, self._unfinished = (self._unfinished + text).split("\n")
        if not data or len(self._unfinished) >= MAX_LINE:
            lines.append(self._unfinished)
            self._unfinished = ""
        return [line[at : at + MAX_LINE] for line in lines if line.strip() for at in range(0, len(line), MAX_LINE)]


@dataclass
class Rank:
    """A rank's process, started by the fork server for this agent."""

    place: Place
    """Place of the rank. The local rank is the rank's key at the fork server."""
    channel: Channel
    output: int | None
    """Descriptor of the read end of the rank's standard output and error. None after the rank has closed both."""
    num_moves: int | None = None
    """Number of signs of life that the rank has reported. None before the first report."""
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    watchdog: str = ""
    """Newest log line in which torch's NCCL watchdog reports that it aborts the process. Empty without any."""
    kill_at: float | None = None
    """Time on the monotonic clock at which the agent kills the rank. None before an order to stop."""
    _lines: Lines = field(default_factory=Lines)

    @property
    def log_tail(self) -> str:
        """End of the rank's log, for an error."""
        return "\n".join(self.tail)[-TAIL_SIZE:]

    def read_lines(self) -> list[str]:
        """Return the lines of output that have arrived since the last call."""
        if self.output is None:  # the rank's exit was handled a moment ago
            return []
        try:
            data = os.read(self.output, 1 << 16)
        except BlockingIOError:
            return []
        if not data:
            os.close(self.output)
            self.output = None
        return self._lines.feed(data)

    def note(self, lines: list[str]) -> None:
        """Add lines to the tail of the log, and note a line of the NCCL watchdog."""
        self.tail.extend(line[-TAIL_SIZE:] for line in lines[-TAIL_LINES:])
        # Stacks of all threads follow the watchdog's line, and push that line out of the tail.
        self.watchdog = next((line[:TAIL_SIZE] for line in lines[::-1] if is_of_watchdog(line)), self.watchdog)

    def take_stacks(self, scratch: Path) -> str:
        """Return the rank's stacks from its file in this folder, and empty the file."""
        path = orders.stacks_path(scratch, self.place)
        with contextlib.suppress(OSError):  # a starting rank has no file yet
            if text := path.read_text(errors="replace")[: orders.MAX_STACKS]:
                os.truncate(path, 0)
                return text
        return ""

    def close(self) -> None:
        """Close the agent's ends of channel and output."""
        self.channel.close()
        if self.output is not None:
            os.close(self.output)
            self.output = None
