"""Folders that go with this process, at the latest once another of the package needs one. Runs in driver and agents.

A process holds a lock on each of its folders, which the kernel takes away however the process ends. The first folder
that a later process of this machine makes removes those without a lock: what processes have left that were killed.
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
"""Seconds before a folder is removed again that was written into meanwhile."""
MACHINE = hashlib.sha256(running_kernel().encode()).hexdigest()[:8]
"""In the names of this machine's folders: locks of other machines may not be seen where several share a disk."""
NAME = re.compile(rf"daskpytorch-(?:[a-z]+-)?{MACHINE}[0-9a-f]{{16}}")
"""Name of a scratch folder of this machine."""


@contextlib.contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """Make an empty folder among the temporary ones, for the time of this context.

    Args:
        prefix: How the folder's name begins; `daskpytorch-`, or that and a word: `daskpytorch-results-`.
    """
    place = tempfile.gettempdir()
    _tidy(place)
    folder = Path(place, f"{prefix}{MACHINE}{secrets.token_hex(8)}")
    unseen = folder.with_name(f".{folder.name}")  # until there is a lock
    unseen.mkdir(mode=0o700)
    lock = os.open(unseen, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: the folder stays if this process is killed
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
    """Remove the scratch folders there of this user's processes that no longer run."""
    for entry in os.scandir(place):
        if NAME.fullmatch(entry.name):
            with contextlib.suppress(OSError):  # another process removes it, or it is another user's
                lock = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    if os.fstat(lock).st_uid == os.geteuid():
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        shutil.rmtree(entry.path, ignore_errors=True)
                finally:
                    os.close(lock)


def _remove(folder: Path) -> None:
    """Remove a folder in which ranks that are being killed, or a thread that was given up, may still be at work."""
    for wait_for in (*RETRY_AFTER, 0.0):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(wait_for)
