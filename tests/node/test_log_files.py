"""A disk that fails costs the log files and one message, never the agent."""

import os
import threading
from pathlib import Path

import psutil
import pytest

from flytekitplugins.daskpytorch.node import ranks
from flytekitplugins.daskpytorch.node.ranks import LogFiles
from processes import small_disk, until

pytestmark = pytest.mark.timeout(60)


def open_below(folder: Path) -> list[int]:
    """Return the descriptors of this process that have files below a folder open."""
    return [file.fd for file in psutil.Process().open_files() if file.path.startswith(str(folder))]


def writing() -> list[threading.Thread]:
    """Return the threads of this process that write log files."""
    return [thread for thread in threading.enumerate() if thread.name == "daskpytorch-logs"]


def test_a_full_disk_is_told_once_and_ends_all_files(tmp_path: Path) -> None:
    told: list[str] = []
    with small_disk(tmp_path / "disk") as folder:
        logs = LogFiles(folder / "g", told.append)
        copies = [copy for rank in range(4) for copy in logs.copies(0, rank)]
        for _ in range(64):
            for copy in copies:
                copy(bytes(1 << 16))
        until(lambda: told, "the message")
        for copy in copies:
            copy(b"")
        assert logs.place(0, 0) == ""
        logs.close()
        assert not open_below(folder)
    [message] = told
    assert "No space left on device" in message
    assert str(folder / "g") in message


def fifo_in(folder: Path) -> Path:
    """Make rank 0's file of standard output a named pipe, in which a write waits until the pipe has a reader."""
    fifo = folder / "g" / "attempt_0" / "0" / "stdout.log"
    fifo.parent.mkdir(parents=True)
    os.mkfifo(fifo)
    return fifo


def test_a_disk_that_hangs_does_not_delay_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "CLOSE_TIMEOUT", 0.1)
    told: list[str] = []
    fifo = fifo_in(tmp_path)
    logs = LogFiles(tmp_path / "g", told.append)
    out, _ = logs.copies(0, 0)
    for _ in range(2 * ranks.MAX_WAITING):
        out(b"line\n")
    logs.close()
    [message] = told
    assert "too slow" in message
    os.close(os.open(fifo, os.O_RDONLY | os.O_NONBLOCK))  # lets the thread end, whose write fails without a reader
    until(lambda: not writing(), "the thread to end")
    assert told == [message]
    assert not open_below(tmp_path)
