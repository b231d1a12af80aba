"""An agent's record of a rank: channel, lines of output, and log files. Runs in agents.

Log files have the names of `torchrun --log-dir`: <log_dir>/<gang>/attempt_<n>/<rank>/stdout.log, stderr.log
"""

import codecs
import functools
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Channel
from multiprocessing.connection import wait
from pathlib import Path

from flytekitplugins.daskpytorch.process.worker import Worker
from flytekitplugins.daskpytorch.protocol.failure import is_of_watchdog
from flytekitplugins.daskpytorch.protocol.placement import Place

STREAMS = ("stdout", "stderr")
MAX_WAITING = 1024
CLOSE_TIMEOUT = 5.0
TOO_SLOW = "the disk is too slow for the ranks' output"

Copy = Callable[[bytes], None]


class LogFiles:
    """Writes ranks' output to files, in a thread, since a slow disk must not delay the agent.

    The first error ends all files of the node, with one message to `tell`. The ranks train on.
    """

    def __init__(self, folder: Path, tell: Callable[[str], None]) -> None:
        self._folder = folder
        self._tell = tell
        self._worker = Worker(name="logs")
        self._has_failed = False

    def copies(self, attempt: int, rank: int) -> list[Copy]:
        folder = self._of_rank(attempt, rank)
        return [functools.partial(self._write, folder / f"{stream}.log") for stream in STREAMS]

    def place(self, attempt: int, rank: int) -> str:
        """Return the folder of a rank's log files, or "" after an error."""
        return "" if self._has_failed else str(self._of_rank(attempt, rank))

    def close(self) -> None:
        self._worker.flush(CLOSE_TIMEOUT)

    def _of_rank(self, attempt: int, rank: int) -> Path:
        return self._folder / f"attempt_{attempt}" / str(rank)

    def _write(self, file: Path, data: bytes) -> None:
        if len(self._worker.jobs) >= MAX_WAITING:
            self._fail(TOO_SLOW)
        if self._has_failed:
            return
        try:
            self._worker.submit(functools.partial(self._append, file, data), self._give_up)
        except RuntimeError as error:  # the process can start no thread, which must not end the agent
            self._fail(str(error))

    def _append(self, file: Path, data: bytes) -> None:
        if not self._has_failed:
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("ab") as opened:
                opened.write(data)

    def _give_up(self, error: Exception, *_: float) -> bool:
        self._fail(str(error))
        return True

    def _fail(self, reason: str) -> None:
        if self._has_failed:
            return
        self._has_failed = True
        self._tell(
            f"Gang(log_dir=...): the log files in {self._folder} on {os.uname().nodename} end here: {reason}. The "
            "training goes on, and the driver's log has all output. Check the disk's space and the folder's owner"
        )


# ---- Log files


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
    def __init__(self, descriptor: int, copy: Copy) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self._copy = copy
        self._lines = LineSplitter()
        self.is_open = True

    def read_lines(self) -> list[str]:
        if not self.is_open:  # the rank's exit was handled a moment ago
            return []
        try:
            data = os.read(self.descriptor, 1 << 16)
        except BlockingIOError:
            return []
        if data:
            self._copy(data)
        else:
            self.close()
        return self._lines.feed(data)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            os.close(self.descriptor)
            self._copy(b"")


def open_pipes(copies: Sequence[Copy]) -> tuple[list[Output], list[int]]:
    pipes = [os.pipe() for _ in copies]
    return [Output(end, copy) for (end, _), copy in zip(pipes, copies, strict=True)], [end for _, end in pipes]


@dataclass
class Rank:
    place: Place
    attempt: int
    channel: Channel
    outputs: list[Output]
    """One pipe for standard output and error together, or one for each if they have log files."""
    num_moves: int | None = None
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    watchdog: str = ""
    """Newest log line in which torch's NCCL watchdog aborts the process."""
    kill_at: float | None = None

    @property
    def log_tail(self) -> str:
        return "\n".join(self.tail)[-TAIL_SIZE:]

    def open_outputs(self) -> list[Output]:
        return [output for output in self.outputs if output.is_open]

    def take_lines(self) -> list[str]:
        """Read each pipe once, so that a process that goes on writing cannot keep the agent here."""
        return [line for output in self.open_outputs() for line in output.read_lines()]

    def remaining_lines(self) -> Iterator[list[str]]:
        """Yield the lines of each read, for a process that outlives the rank, and writes without a limit."""
        for output in self.open_outputs():
            while output.is_open and wait([output.descriptor], 0):
                yield output.read_lines()

    def note(self, lines: list[str]) -> None:
        self.tail.extend(line[-TAIL_SIZE:] for line in lines[-TAIL_LINES:])
        # Stacks of all threads follow the watchdog's line, and push that line out of the tail.
        self.watchdog = next((line[:TAIL_SIZE] for line in lines[::-1] if is_of_watchdog(line)), self.watchdog)

    def close(self) -> None:
        self.channel.close()
        for output in self.outputs:
            output.close()
