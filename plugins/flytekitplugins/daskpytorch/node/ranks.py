"""A rank as its agent has it: channel, output in lines, stacks that the rank writes down. Runs in agents."""

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
"""Lines of a rank's log that go into an error, at most."""
TAIL_SIZE = 16 << 10
"""Characters of a rank's log that go into an error, at most."""
MAX_LINE = 64 << 10
"""Characters of a line, at most; a longer line goes on in pieces of this size."""


class Lines:
    """Makes lines of a stream, in time proportional to the stream's length, with a bound on what is held."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._unfinished: list[str] = []
        """The pieces of a line without its end."""
        self._size = 0

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that end in these bytes, without blank ones. No bytes stand for the stream's end."""
        # A carriage return ends a line too: each state of a progress bar is one.
        first, *others = self._decoder.decode(data, final=not data).replace("\r", "\n").split("\n")
        lines = []
        self._add(first)
        for start in others:
            lines.append(self._finish())
            self._add(start)
        if not data or self._size >= MAX_LINE:
            lines.append(self._finish())
        return [line[at : at + MAX_LINE] for line in lines if line.strip() for at in range(0, len(line), MAX_LINE)]

    def _add(self, piece: str) -> None:
        self._unfinished.append(piece)
        self._size += len(piece)

    def _finish(self) -> str:
        line = "".join(self._unfinished)
        self._unfinished, self._size = [], 0
        return line


@dataclass
class Rank:
    """One process that the fork server has started for this agent."""

    key: int
    """Name of the rank at the fork server: the local rank."""
    channel: Channel
    output: int | None
    """Read end of the rank's standard output and error; None once the rank has closed them."""
    place: Place | None = None
    """None while the rank waits for its orders."""
    num_moves: int | None = None
    """Signs of life that the rank has given, as far as it has said."""
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    watchdog: str = ""
    """Newest log line in which torch's NCCL watchdog says that it aborts the process."""
    kill_at: float | None = None
    """Time, on the monotonic clock, at which the rank is killed; None unless it was told to stop."""
    _lines: Lines = field(default_factory=Lines)

    @property
    def log_tail(self) -> str:
        """The end of the rank's log, for an error."""
        return "\n".join(self.tail)[-TAIL_SIZE:]

    def read_lines(self) -> list[str]:
        """Return the next lines of the output, as far as there are any."""
        if self.output is None:  # the rank's exit was noted a moment ago
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
        """Keep of these lines of the log what an error would show."""
        self.tail.extend(line[-TAIL_SIZE:] for line in lines[-TAIL_LINES:])
        # Noted here, since stacks of all threads follow, which are longer than the tail.
        self.watchdog = next((line[:TAIL_SIZE] for line in lines[::-1] if is_of_watchdog(line)), self.watchdog)

    def take_stacks(self, scratch: Path) -> str:
        """Return the stacks that the rank has written down in this folder, and empty the file."""
        if self.place is None:
            return ""
        path = orders.stacks_path(scratch, self.place)
        with contextlib.suppress(OSError):  # the rank may not have come so far
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
