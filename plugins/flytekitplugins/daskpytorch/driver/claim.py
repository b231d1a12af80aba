"""Keeps two gangs from writing to one checkpoint folder or URL. Runs in the driver.

    claim.json: written at the start -> read before each write of a checkpoint -> removed at the end

The newest gang has the folder. An older gang on another machine learns that before its next write, and ends. A gang is
refused whose folder has a living owner on the same machine.
"""

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flytekitplugins.daskpytorch.errors import GangStartError
from flytekitplugins.daskpytorch.process.log import say
from flytekitplugins.daskpytorch.protocol.host import StoragePaths

CLAIM = "claim.json"
_held: set[str] = set()
"""Identities of the claims on checkpoint folders that this process holds."""


class Claim:
    """A gang's claim on its checkpoint folder, which a newer gang may take over."""

    def __init__(self, paths: StoragePaths, name: str) -> None:
        self.paths = replace(paths, prepare=self._prepare)
        """Folders for the gang's checkpoints. Each write first checks the claim."""
        self._prepare_storage = paths.prepare
        self._path = f"{paths.own}/{CLAIM}"
        self._about: dict[str, Any] = {
            "id": secrets.token_hex(8),
            "name": name,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": _started(os.getpid()),
            "machine": _machine(),
            "since": time.time(),
        }
        self.on_loss: Callable[[], object] = lambda: None
        """Called in the thread that writes to storage, after a newer gang has taken over the folder."""
        self.loss: GangStartError | None = None
        """Error that the gang raises after a newer gang has taken over the folder. None: no other gang has."""

    def take(self) -> None:
        """Claim the folder.

        Raises:
            GangStartError: Another live gang of this machine uses the folder.
        """
        _held.add(self._about["id"])  # first: another thread of this process may read the new claim
        try:
            self._create()
        except BaseException:
            _held.discard(self._about["id"])
            raise

    def _create(self) -> None:
        files, content = self.paths.files, json.dumps(self._about).encode()
        while not files.create(self._path, content):
            holder = self._read() or {}
            if _is_alive_here(holder):
                raise GangStartError(
                    f"{self.paths.own} is in use by {_told(holder)}: two gangs would remove each other's checkpoints. "
                    "Wait for its end, or give this gang another Gang(key=...) or Gang(checkpoint_uri=...)."
                )
            say(f"{self.paths.own}: taken over from {_told(holder)}, which writes nothing more there")
            with contextlib.suppress(FileNotFoundError):
                files.fs.rm_file(self._path)

    def release(self) -> None:
        """Remove the claim, unless a newer gang has taken over the folder."""
        if self._about["id"] in _held:
            _held.discard(self._about["id"])
            with contextlib.suppress(Exception):  # any error of a store's client: the next gang takes the claim over
                if (self._read() or {}).get("id") == self._about["id"]:
                    self.paths.files.fs.rm_file(self._path)

    def _prepare(self) -> None:
        holder = self._read() if self._about["id"] in _held else None
        if holder and holder.get("id") != self._about["id"]:
            self.loss = GangStartError(
                f"{self.paths.own} was taken over by {_told(holder)}. Nothing more is written there. If both gangs are "
                "to train, give each a Gang(key=...) of its own."
            )
            self.on_loss()
            raise self.loss
        self._prepare_storage()

    def _read(self) -> dict[str, Any] | None:
        """Return the content of the folder's claim, perhaps of another gang. Empty: unreadable. None: no claim."""
        self.paths.files.fs.invalidate_cache()
        try:
            content = json.loads(self.paths.files.read(self._path))
        except FileNotFoundError:
            return None
        except ValueError:  # empty or cut off, as after a crash of its machine
            return {}
        return content if isinstance(content, dict) else {}


@contextlib.contextmanager
def claimed(paths: StoragePaths | None, name: str) -> Iterator[Claim | None]:
    """Hold a claim on a gang's checkpoint folder during a `with` block, if other gangs may get the same folder.

    Args:
        paths: Folders of the gang's checkpoints in storage. None: no storage, and so no claim.
        name: Name of the gang in other gangs' messages.

    Raises:
        GangStartError: Another live gang of this machine uses the folder, or a newer gang has taken over the folder.
    """
    if paths is None or not paths.is_claimed:
        yield None
        return
    claim = Claim(paths, name)
    try:
        claim.take()
    except GangStartError:
        raise
    except Exception as error:  # any error of a store's client: the gang works without a claim
        say(
            f"{paths.own} could not be claimed ({type(error).__name__}: {error}). Make sure that no other gang has the "
            "same key and checkpoint_uri: two such gangs would remove each other's checkpoints."
        )
    try:
        yield claim
    except Exception as error:
        if claim.loss is not None:
            raise claim.loss from error
        raise
    finally:
        claim.release()


def _is_alive_here(holder: Mapping[str, Any]) -> bool:
    """Return True if a claim's owner is a live process of this machine, or this process itself."""
    if not holder.get("machine") or holder["machine"] != _machine():
        return False
    if holder["pid"] == os.getpid():
        return holder["id"] in _held
    return bool(holder["started"]) and _started(holder["pid"]) == holder["started"]


def _told(holder: Mapping[str, Any]) -> str:
    if "since" not in holder:
        return "a gang whose claim cannot be read"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(holder["since"]))
    return f"{holder['name']} on {holder['host']} (process {holder['pid']}), which began at {since} UTC by its clock"


def _machine() -> str:
    """Return an identity of this machine since its boot, and of this process's PID namespace. Empty if unknown.

    In two processes with the same identity, a PID means the same process.
    """
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """Return a process's start time in clock ticks since the boot, to tell it from later processes of the same PID.

    Returns:
        None if the process has ended.
    """
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in ("Z", "X") else fields[18]
