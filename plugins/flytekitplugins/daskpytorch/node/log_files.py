"""Log files of a node's ranks, by the names that `torchrun --log-dir` has. Runs in agents.

<log_dir>/<gang>/attempt_<n>/<rank>/stdout.log, stderr.log
"""

import contextlib
import functools
import os
from collections.abc import Callable
from pathlib import Path

from flytekitplugins.daskpytorch.process.worker import Worker

STREAMS = ("stdout", "stderr")
MAX_WAITING = 1024
"""Maximum number of pieces of output, of up to 64 KiB each, that wait for the disk."""
CLOSE_TIMEOUT = 5.0
"""Timeout, in seconds, for the disk to take what waits at the gang's end."""
TOO_SLOW = "the disk is too slow for the ranks' output"
"""Reason in the message if more pieces wait than may."""

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
        self._worker = Worker(name="logs")
        self._files: dict[Path, int] = {}
        """Descriptor of each open file."""
        self._has_failed = False

    def copies(self, attempt: int, rank: int) -> list[Copy]:
        """Return the functions that write a rank's standard output and standard error, in that order."""
        folder = self._of_rank(attempt, rank)
        return [functools.partial(self._write, folder / f"{stream}.log") for stream in STREAMS]

    def place(self, attempt: int, rank: int) -> str:
        """Return the folder of a rank's log files. Empty after an error."""
        return "" if self._has_failed else str(self._of_rank(attempt, rank))

    def close(self) -> None:
        """Write the waiting output and close all files. The thread goes on with what takes longer than the timeout."""
        self._submit(self._close_files)
        self._worker.flush(CLOSE_TIMEOUT)

    def _of_rank(self, attempt: int, rank: int) -> Path:
        return self._folder / f"attempt_{attempt}" / str(rank)

    def _write(self, file: Path, data: bytes) -> None:
        if len(self._worker.jobs()) >= MAX_WAITING:
            self._fail(TOO_SLOW)
        if not self._has_failed:
            self._submit(functools.partial(self._append, file, data))

    def _submit(self, work: Callable[[], None]) -> None:
        try:
            self._worker.submit(work, self._give_up)
        except RuntimeError as error:  # the process can start no thread, which must not end the agent
            self._fail(str(error))

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

    def _give_up(self, error: Exception, *_: float) -> bool:
        self._fail(str(error))
        return True

    def _fail(self, reason: str) -> None:
        if self._has_failed:
            return
        self._has_failed = True
        self._submit(self._close_files)
        self._tell(
            f"Gang(log_dir=...): the log files in {self._folder} on {os.uname().nodename} end here: {reason}. The "
            "training goes on, and the driver's log has all output. Check the disk's space and the folder's owner"
        )

    def _close_files(self) -> None:
        """Close all files, although some may fail to close."""
        while self._files:
            _, descriptor = self._files.popitem()
            with contextlib.suppress(OSError):  # NFS may report a full disk only here
                os.close(descriptor)
