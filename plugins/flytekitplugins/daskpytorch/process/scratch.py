"""Scratch folders that are removed with their process, in driver and agents.

A process locks each of its folders, and the kernel releases the lock however the process ends. Before a process makes
its first folder, it removes this machine's folders without a lock. Killed processes have left those.
"""

import contextlib
import fcntl
import functools
import hashlib
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from flytekitplugins.daskpytorch.process.system import running_kernel

RETRY_AFTER = (0.01, 0.05, 0.2, 0.5, 1.0)
"""Seconds before each retry to remove a folder in use."""
MACHINE = hashlib.sha256(running_kernel().encode()).hexdigest()[:8]
"""Part of this machine's folder names. On a shared disk, the locks of other machines may be invisible."""
NAME = re.compile(rf"daskpytorch-(?:[a-z]+-)?{MACHINE}[0-9a-f]{{16}}")
"""Name of a scratch folder of this machine."""


@contextlib.contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """Make an empty folder in the system's temporary folder, and remove it at the end of the context.

    Args:
        prefix: Start of the folder's name: `daskpytorch-`, or with a word `daskpytorch-results-`.
    """
    place = tempfile.gettempdir()
    _tidy(place)
    folder = Path(place, f"{prefix}{MACHINE}{secrets.token_hex(8)}")
    unseen = folder.with_name(f".{folder.name}")  # hidden until the lock is held
    unseen.mkdir(mode=0o700)
    lock = os.open(unseen, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks keeps the folder after a kill
            fcntl.flock(lock, fcntl.LOCK_EX)
        unseen.rename(folder)
        yield folder
    finally:
        _remove(folder)
        os.close(lock)


@functools.cache
def _tidy(place: str) -> None:
    remove_abandoned(place)


def remove_abandoned(place: str) -> None:
    """Remove scratch folders in `place` that ended processes of this user have left."""
    for entry in os.scandir(place):
        if NAME.fullmatch(entry.name):
            with contextlib.suppress(OSError):  # a process holds the lock, or another user owns the folder
                lock = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    if os.fstat(lock).st_uid == os.geteuid():
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        shutil.rmtree(entry.path, ignore_errors=True)
                finally:
                    os.close(lock)


def _remove(folder: Path) -> None:
    """Remove a folder, with retries: dying ranks or abandoned threads may still write files."""
    for wait_for in (*RETRY_AFTER, 0.0):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(wait_for)
