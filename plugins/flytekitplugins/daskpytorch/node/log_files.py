"""Log files of a node's ranks, by the names that `torchrun --log-dir` has. Runs in agents.

<log_dir>/<gang>/attempt_<n>/<rank>/stdout.log, stderr.log
"""

import functools
import os
from collections.abc import Callable
from pathlib import Path

from flytekitplugins.daskpytorch.process.worker import Worker

STREAMS = ("stdout", "stderr")
LANE = "logs"
"""Name of the writing thread and of its queue."""
MAX_WAITING = 1024
"""Maximum number of pieces of output, of up to 64 KiB each, that wait for the disk."""
CLOSE_TIMEOUT = 5.0
"""Timeout, in seconds, for the disk to take what waits at the gang's end."""

Copy = Callable[[bytes], None]
"""Function that gets each piece of a stream, and b"" at the stream's end."""


class LogFiles:
    """Writes the output of a node's ranks to files, in a thread of its own, since a slow disk must not delay the agent.

    The first error ends all files of the node, with one message. The ranks train on.

    Args:
        folder: Folder of the gang's log files on this node.
        tell: Gets the message.
    """

    def __init__(self, folder: Path, tell: Callable[[str], None]) -> None:
        self._folder = folder
        self._tell = tell
        self._worker = Worker(name=LANE)
        self._files: dict[Path, int] = {}
        self._has_failed = False

    def copies(self, attempt: int, rank: int) -> list[Copy]:
        """Return the functions that write a rank's standard output and standard error, in that order."""
        folder = self._of_rank(attempt, rank)
        return [functools.partial(self._write, folder / f"{stream}.log") for stream in STREAMS]

    def place(self, attempt: int, rank: int) -> str:
        """Return the folder of a rank's log files. Empty after an error."""
        return "" if self._has_failed else str(self._of_rank(attempt, rank))

    def close(self) -> None:
        """Write what waits, within the timeout, and close all files."""
        self._worker.submit(LANE, self._end)
        self._worker.flush(LANE, CLOSE_TIMEOUT)

    def _of_rank(self, attempt: int, rank: int) -> Path:
        return self._folder / f"attempt_{attempt}" / str(rank)

    def _write(self, file: Path, data: bytes) -> None:
        if not self._has_failed and len(self._worker.jobs(LANE)) >= MAX_WAITING:
            self._fail("the disk is too slow for the ranks' output")
        if not self._has_failed:
            self._worker.submit(LANE, functools.partial(self._append, file, data), self._gives_up)

    def _append(self, file: Path, data: bytes) -> None:
        """Append data to a file, which is opened first if it is not open. Empty data close the file."""
        if self._has_failed:
            return
        if file not in self._files:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._files[file] = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        if not data:
            os.close(self._files.pop(file))
        while data:
            data = data[os.write(self._files[file], data) :]

    def _end(self) -> None:
        """Close all files and end the thread, also if a disk answers only after the timeout."""
        while self._files:
            os.close(self._files.popitem()[1])
        self._worker.close()

    def _gives_up(self, error: Exception, *_: object) -> bool:
        self._fail(str(error))
        return True

    def _fail(self, reason: str) -> None:
        self._has_failed = True
        self._tell(
            f"Gang(log_dir=...): the log files in {self._folder} on {os.uname().nodename} end here: {reason}. The "
            "training goes on, and the driver's log has all output. Check the disk's space and the folder's owner"
        )
