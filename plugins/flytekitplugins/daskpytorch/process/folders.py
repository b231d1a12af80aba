"""Scratch folders that are removed with their process, and folders to which only this user may write.

The kernel releases a scratch folder's lock however its process ends, and a later process removes folders without a
lock. Reading what another user has put into a private folder may run that user's code.
"""

import contextlib
import fcntl
import functools
import hashlib
import os
import pwd
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from grp import getgrgid
from pathlib import Path

from flytekitplugins.daskpytorch.process.system import running_kernel

RETRY_AFTER = (0.01, 0.05, 0.2, 0.5, 1.0)
MACHINE = hashlib.sha256(running_kernel().encode()).hexdigest()[:8]
"""In the names of scratch folders: on a shared disk, other machines' locks may be invisible."""
FOLDER_VARIABLE = "DASKPYTORCH_CHECKPOINTS"
"""Folder for checkpoints of local runs, which are not kept after a run if it is empty."""
NAME = re.compile(rf"daskpytorch-(?:[a-z]+-)?{MACHINE}[0-9a-f]{{16}}")


@contextlib.contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """Make an empty folder in the system's temporary folder, and remove it at the end of the context."""
    place = tempfile.gettempdir()
    remove_abandoned(place)
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


@functools.cache  # once a process
def remove_abandoned(place: str) -> None:
    for entry in os.scandir(place):
        if NAME.fullmatch(entry.name):
            remove_unlocked(Path(entry.path))


def remove_unlocked(folder: Path) -> None:
    """Remove a folder of this user, unless a process holds a lock on it."""
    with contextlib.suppress(OSError):  # a process holds the lock, or another user owns the folder
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(lock).st_uid == os.geteuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def _remove(folder: Path) -> None:
    """Remove with retries, since dying ranks or abandoned threads may still write files."""
    for wait_for in (*RETRY_AFTER, 0.0):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(wait_for)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[int]:
    """Yield a file's descriptor while this process alone holds its lock. A disk without locks lets all in."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock
    finally:
        os.close(lock)


@contextlib.contextmanager
def replacing(target: Path, unfinished: Path) -> Iterator[Path]:
    try:
        yield unfinished
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


WRITABLE = stat.S_IWGRP | stat.S_IWOTH
REACHABLE = stat.S_IXGRP | stat.S_IXOTH


def make_private(folder: Path) -> None:
    """Make a folder (mode 0700) and its missing parents. PermissionError: another user owns it, or can write to it."""
    for level in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
        level.mkdir(mode=0o700, exist_ok=True)
    refuse_foreign(folder, with_files=False)


def refuse_foreign(folder: Path, *, with_files: bool = True) -> None:
    """Raise PermissionError if another user (not root) owns, or can write, the folder or a file directly in it."""
    _refuse(folder, folder, WRITABLE)
    is_closed = not folder.stat().st_mode & REACHABLE
    for path in folder.iterdir() if with_files else ():
        if path.is_file():
            _refuse(path, folder, 0 if is_closed else WRITABLE)


def _refuse(path: Path, folder: Path, bits: int) -> None:
    status = path.stat()
    owner, writable = status.st_uid, status.st_mode & bits
    if writable == stat.S_IWGRP and _is_private(status.st_gid):
        writable = 0
    is_mine = owner in (os.geteuid(), 0)
    if (is_mine and not writable) or _is_usual(folder, owner, writable):
        return
    if not is_mine:
        raise PermissionError(
            f"{path} belongs to another user ({_name_of(owner)}); this process runs as {_name_of(os.geteuid())}. Other "
            "users' files are not read here, since reading them may run their code. Name another folder, or make this "
            "one your own (chown) if you know what is in there."
        )
    raise PermissionError(
        f"other users can write to {path} (mode {stat.S_IMODE(status.st_mode):04o}). It is not read, since "
        f"reading what they have put there may run their code. If all of it is yours: chmod -R go-w {path}"
    )


def _is_private(group: int) -> bool:
    try:
        user, named = pwd.getpwuid(os.geteuid()), getgrgid(group)
    except KeyError:
        return False
    return user.pw_gid == group and user.pw_name == named.gr_name and set(named.gr_mem) <= {user.pw_name}


def _is_usual(folder: Path, owner: int, mode: int) -> bool:
    """Return True if a new file there has this owner and mode, as on mounts that give all files the same ones."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".daskpytorch-") as file:  # the file's mode is 0600
            found = os.fstat(file.fileno())
    except OSError:
        return False
    return found.st_uid == owner and found.st_mode & WRITABLE == mode


def _name_of(user: int) -> str:
    try:
        return f"{pwd.getpwuid(user).pw_name}, uid {user}"
    except KeyError:
        return f"uid {user}"


def state_of(path: Path) -> tuple[int, ...] | None:
    """Return device, inode, size and modification time, of which a write changes at least one. None: no file.

    Containers of one machine may have files with the same inode, but on other devices.
    """
    try:
        found = path.stat()
    except OSError:
        return None
    # Without st_ctime_ns, which changes when a link is removed.
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def local_runs_folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "daskpytorch", "checkpoints")
    return Path(os.environ.get(FOLDER_VARIABLE) or cache).expanduser().resolve()
