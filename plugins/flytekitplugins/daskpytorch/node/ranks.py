"""An agent's record of a rank: its channel and its lines of output. Runs in agents."""

import codecs
import os
import re
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Channel
from multiprocessing.connection import wait

from flytekitplugins.daskpytorch.protocol.failure import is_of_watchdog
from flytekitplugins.daskpytorch.protocol.placement import Place

TAIL_LINES = 40
TAIL_SIZE = 16 << 10
MAX_LINE = 64 << 10
"""Characters of a line of output, which is cut there."""
_END = re.compile("([\r\n])")


class LineSplitter:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._unfinished = ""
        self._is_after_return = False

    def feed(self, data: bytes) -> list[str]:
        """Return the newly complete lines. b"" ends the stream.

        A carriage return also ends a line, for the states of a progress bar. A blank line counts only if a newline ends
        it, and no carriage return comes just before.
        """
        *ended, self._unfinished = _END.split(self._unfinished + self._decoder.decode(data, final=not data))
        lines = []
        for line, end in zip(ended[::2], ended[1::2], strict=True):
            if line.strip() or (end == "\n" and not self._is_after_return):
                lines.append(line)
            self._is_after_return = end == "\r"
        if not data or len(self._unfinished) >= MAX_LINE:
            lines += [self._unfinished] if self._unfinished.strip() else []
            self._unfinished = ""
        return [line[at : at + MAX_LINE] for line in lines for at in range(0, max(len(line), 1), MAX_LINE)]


class Output:
    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self._lines = LineSplitter()
        self.is_open = True

    def read_lines(self) -> list[str]:
        if not self.is_open:  # the rank's exit was handled a moment ago
            return []
        try:
            data = os.read(self.descriptor, 1 << 16)
        except BlockingIOError:
            return []
        if not data:
            self.close()
        return self._lines.feed(data)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            os.close(self.descriptor)

    def has_more(self) -> bool:
        return self.is_open and bool(wait([self.descriptor], 0))


@dataclass
class Rank:
    place: Place
    channel: Channel
    output: Output
    num_moves: int | None = None
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    watchdog: str = ""
    """Newest log line in which torch's NCCL watchdog aborts the process."""
    kill_at: float | None = None

    @property
    def log_tail(self) -> str:
        return "\n".join(self.tail)[-TAIL_SIZE:]

    def note(self, lines: list[str]) -> None:
        self.tail.extend(line[-TAIL_SIZE:] for line in lines[-TAIL_LINES:])
        # Stacks of all threads follow the watchdog's line, and push that line out of the tail.
        self.watchdog = next((line[:TAIL_SIZE] for line in lines[::-1] if is_of_watchdog(line)), self.watchdog)

    def close(self) -> None:
        self.channel.close()
        self.output.close()
