"""Claims a gang's checkpoint folder or URL against use by two gangs. Runs in the driver.

    claim.json: created if missing -> renewed every 10 s -> removed at the end

A gang takes over a dead owner's claim: at once if this machine, Flyte or Slurm shows the death, else after 60 s without
renewal. The waiting gang measures those 60 s by its own clock, so that clocks of two machines may differ.
"""

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from flytekitplugins.daskpytorch.errors import GangStartError
from flytekitplugins.daskpytorch.process.log import say
from flytekitplugins.daskpytorch.protocol.files import Files
from flytekitplugins.daskpytorch.protocol.host import StoragePaths

CLAIM = "claim.json"
RENEW_EVERY = 10.0
"""Seconds between two renewals of a claim on a checkpoint folder by its owner."""
STALE_AFTER = 60.0
"""Seconds without a renewal after which another gang takes over a claim on a checkpoint folder."""
FIRST_LOOK = 1.0
"""Seconds after which a gang checks that its new claim is still there. Some stores let two gangs create a claim."""
POLL_INTERVAL = 1.0
JOBS = (
    ("FLYTE_INTERNAL_EXECUTION_ID", "FLYTE_INTERNAL_TASK_NAME", "FLYTE_ATTEMPT_NUMBER"),
    ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
)
"""Environment variables with a Flyte or Slurm job, its part and its attempt. No two attempts of a job run together."""
_held: set[str] = set()
"""Identities of the claims on checkpoint folders that this process holds."""


class Claim:
    """A gang's claim on its checkpoint folder, which keeps other gangs from using the folder."""

    def __init__(self, files: Files, folder: str, name: str) -> None:
        self._files = files
        self._folder = folder
        self._path = f"{folder}/{CLAIM}"
        self._about: dict[str, Any] = {
            "id": secrets.token_hex(8),
            "name": name,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": _started(os.getpid()),
            "machine": _machine(),
            "job": _job(),
            "since": time.time(),
        }
        self._number = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="daskpytorch-claim", daemon=True)
        self.on_loss: Callable[[], object] = lambda: None
        """Called in the thread that renews the claim, when another gang has taken over the claim."""
        self.loss: GangStartError | None = None
        """Error that the gang raises after another gang has taken over the claim. None: no other gang has."""

    def take(self, is_over: Callable[[], bool]) -> None:
        """Claim the folder, and begin to renew the claim. First wait until an earlier owner is known dead or alive.

        Args:
            is_over: Returns True if the wait for an earlier owner should end.

        Raises:
            GangStartError: Another live gang uses the folder, or `is_over()` returned True.
        """
        _held.add(self._about["id"])  # first: another thread of this process may read the new claim
        try:
            self._create(is_over)
        except BaseException:
            _held.discard(self._about["id"])
            raise
        self._thread.start()

    def _create(self, is_over: Callable[[], bool]) -> None:
        seen: Mapping[str, Any] | None = None
        unchanged_since, has_told = 0.0, False
        while not self._files.create(self._path, self._content()):
            holder = self._read() or {}
            if holder != seen:
                if seen and holder.get("id") == seen.get("id"):  # a renewal
                    raise GangStartError(self._refusal(holder))
                seen, unchanged_since = holder, time.monotonic()
            if (is_alive := _is_alive(holder)) or is_over():
                raise GangStartError(self._refusal(holder))
            if is_alive is False or time.monotonic() - unchanged_since >= STALE_AFTER:
                say(f"{self._folder}: taken over from {_told(holder)}, which has ended")
                with contextlib.suppress(FileNotFoundError):
                    self._files.fs.rm_file(self._path)
                continue
            if not has_told:
                say(f"{self._folder} is claimed by {_told(holder)}; waiting up to {STALE_AFTER:g} s for a sign of life")
                has_told = True
            time.sleep(POLL_INTERVAL)

    def release(self) -> None:
        """Stop the renewals and remove the claim, so that another gang can claim the folder at once."""
        if self._about["id"] not in _held:
            return
        self._over.set()
        self._thread.join(RENEW_EVERY)
        _held.discard(self._about["id"])
        with contextlib.suppress(Exception):  # any error of a store's client: the claim becomes stale
            if (self._read() or {}).get("id") == self._about["id"]:
                self._files.fs.rm_file(self._path)

    def _keep(self) -> None:
        wait = FIRST_LOOK
        while not self._over.wait(wait):
            wait = RENEW_EVERY
            with contextlib.suppress(Exception):  # storage without an answer may answer next time
                if (holder := self._read()) is None:  # the folder was cleared
                    self._files.create(self._path, self._content())
                elif holder.get("id", self._about["id"]) == self._about["id"]:  # no id: the claim was damaged
                    self._number += 1
                    self._files.write(self._path, self._content())
                else:
                    self.loss = GangStartError(
                        f"{self._folder} was taken over by {_told(holder)}, since this gang had not renewed its claim "
                        f"for {STALE_AFTER:g} s: was its driver suspended? Nothing more is written there. If both "
                        "gangs are to train, give each a Gang(key=...) of its own."
                    )
                    say(str(self.loss))
                    self.on_loss()
                    return

    def _content(self) -> bytes:
        return json.dumps({**self._about, "number": self._number}).encode()

    def _read(self) -> dict[str, Any] | None:
        """Return the content of the folder's claim, perhaps of another gang. Empty: unreadable. None: no claim."""
        self._files.fs.invalidate_cache()
        try:
            content = json.loads(self._files.read(self._path))
        except FileNotFoundError:
            return None
        except ValueError:  # empty or cut off, as after a crash of its machine
            return {}
        return content if isinstance(content, dict) else {}

    def _refusal(self, holder: Mapping[str, Any]) -> str:
        return (
            f"{self._folder} is in use by {_told(holder)}: two gangs would remove each other's checkpoints. Wait for "
            "its end, or give this gang another Gang(key=...) or Gang(checkpoint_uri=...). A claim that its owner has "
            f"not renewed for {STALE_AFTER:g} s is taken over."
        )


@contextlib.contextmanager
def claimed(paths: StoragePaths | None, name: str, is_over: Callable[[], bool] = lambda: False) -> Iterator[Claim]:
    """Hold a claim on a gang's checkpoint folder during a `with` block, if other gangs may get the same folder.

    Args:
        paths: Folders of the gang's checkpoints in storage. None: no storage, and so no claim.
        name: Name of the gang in other gangs' messages.
        is_over: Returns True if the wait for an earlier owner should end.

    Raises:
        GangStartError: Another live gang uses the folder, or has taken over the claim.
    """
    if paths is None or not paths.is_claimed:
        yield Claim(Files(None), "", name)
        return
    claim = Claim(paths.files, paths.own, name)
    try:
        claim.take(is_over)
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


def _is_alive(holder: Mapping[str, Any]) -> bool | None:
    """Return True if the owner of a claim is alive, False if dead, None if this machine cannot tell at once.

    Args:
        holder: Content of the claim.
    """
    if holder.get("machine") == _machine() and holder["machine"]:
        if holder["pid"] == os.getpid():
            return holder["id"] in _held
        return bool(holder["started"]) and _started(holder["pid"]) == holder["started"]
    job, mine = holder.get("job"), _job()
    if job and mine and job[:-1] == mine[:-1] and int(job[-1]) < int(mine[-1]):
        return False
    return None


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


def _job() -> list[str] | None:
    for names in JOBS:
        values = [os.environ.get(name, "") for name in names]
        if values[0] and values[-1].isdecimal():
            return values
    return None
