"""Folders that go with this process, however it ends: a shell outlives it, and clears up. Runs in driver and agents."""

import contextlib
import os
import shutil
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

RETRY_AFTER = (0.01, 0.05, 0.2, 0.5, 1.0)
"""Seconds before a folder is removed again that was written into meanwhile."""
CLEAR_UP = """
trap '' HUP INT QUIT TERM
while IFS= read -r folder; do set -- "$@" "$folder"; done
for try in 1 2 3 4 5 6 7 8 9 10; do
    rm -rf -- "$@" && exit
    sleep 0.3
done
"""
"""Reads the names of folders; at the end of its input, which is that of the process that writes it, removes them.

More than once where others write into them: an agent's ranks end in the same moment.
"""


@contextlib.contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """Make an empty folder among the temporary ones, for the time of this context."""
    folder = Path(tempfile.gettempdir(), f"{prefix}{uuid.uuid4().hex}")
    _watcher.note(folder)  # before it is there, so that it is never unknown
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a folder in which ranks that are being killed, or a thread that was given up, may still be at work."""
    for wait_for in (*RETRY_AFTER, 0.0):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(wait_for)


class _Watcher:
    """The shell, of which one process needs one; started with the first folder."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shell: subprocess.Popen[bytes] | None = None

    def note(self, folder: Path) -> None:
        """Have a folder removed; where no shell can be started, it stays if this process is killed."""
        with self._lock, contextlib.suppress(OSError):
            if self._shell is None or self._shell.poll() is not None:
                self._shell = _start_shell()
            if self._shell.stdin is not None and "\n" not in str(folder):  # which would be the end of its name
                self._shell.stdin.write(os.fsencode(folder) + b"\n")

    def abandon(self) -> None:
        """Let go of it in a fork of its process: it must not wait for the fork's end."""
        if self._shell is not None and self._shell.stdin is not None:
            self._shell.stdin.close()


def _start_shell() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["/bin/sh", "-c", CLEAR_UP],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env={"PATH": os.defpath},
        start_new_session=True,  # out of reach of what is sent to the terminal's processes
    )


_watcher = _Watcher()


def _start_anew() -> None:
    global _watcher
    _watcher.abandon()
    _watcher = _Watcher()


os.register_at_fork(after_in_child=_start_anew)
