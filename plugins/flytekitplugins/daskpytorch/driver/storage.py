"""Where a gang's checkpoints are kept: the gang's key, which all attempts of a task share, and its folders.

Runs in the driver.
"""

import contextlib
import functools
import hashlib
import json
import os
import secrets
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flytekitplugins.daskpytorch.errors import GangStartError
from flytekitplugins.daskpytorch.process.streams import say
from flytekitplugins.daskpytorch.process.worker import Worker
from flytekitplugins.daskpytorch.protocol.checkpoints import OBJECT, CheckpointEntry, Sharding, save_of
from flytekitplugins.daskpytorch.protocol.files import Files, full_path, unusable
from flytekitplugins.daskpytorch.protocol.function import key_of
from flytekitplugins.daskpytorch.protocol.host import Execution, StoragePaths
from flytekitplugins.daskpytorch.settings import Gang


class Keys:
    """Keys are equal in all attempts of a task."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._task: object = None
        self._taken: set[str] = set()
        self._num_calls: Counter[str] = Counter()

    def take(
        self, function: Callable[..., Any], asked: str | None, suffixes: Sequence[str] = ("",), task: object = None
    ) -> list[str]:
        """Return keys for one call's gangs: a base plus each suffix.

        The default base is the function's name and the call's number.

        Keys ignore arguments, because pickles differ between processes, for example in set order. `task` stands for the
        task's execution, if known. Raises `ValueError` if another gang of this task has the key `asked`.
        """
        with self._lock:
            if task is not None and task is not self._task:  # locally, many tasks run in one process
                self._task, self._taken, self._num_calls = task, set(), Counter()
            for base in [asked] if asked is not None else self._numbered(key_of(function)):
                keys = [f"{base}{suffix}" for suffix in suffixes]
                if self._taken.isdisjoint([base, *keys]) or (asked is not None and task is None):
                    self._taken.update([base, *keys])
                    return keys
        raise ValueError(
            f"Gang(key={asked!r}): another gang of this task has this key, by which the next attempt finds a gang's "
            "checkpoints. Give each gang a key of its own, or none."
        )

    def _numbered(self, name: str) -> Iterator[str]:
        while True:
            self._num_calls[name] += 1
            yield f"{name}-{self._num_calls[name]}"


def storage_of(
    execution: Execution, key: str, settings: Gang, paths: StoragePaths | None = None
) -> StoragePaths | None:
    """Return the folders of a gang's checkpoints, or None if no later attempt looks for them."""
    paths, uri = paths or execution.checkpoint_paths(key), settings.checkpoint_uri
    if uri is None:
        return paths
    if paths is None:  # no host keeps checkpoints, so the next call finds them all here
        files = Files(execution.filesystem(uri))
        own = f"{files.path(uri)}/{key}"
        files.refuse_foreign(own)  # a checkpoint is a pickle
        return StoragePaths(files=files, previous=own, own=own, is_claimed=True)
    shards, previous = (
        f"{uri.rstrip('/')}/{execution.name or key}/{hashlib.sha256(folder.encode()).hexdigest()[:16]}"
        if folder
        else None
        for folder in (paths.own, paths.previous)
    )
    return replace(paths, shards=shards, previous_shards=previous)


def start_of(storage: StoragePaths | None, settings: Gang, step: int | None) -> str | None:
    """Return a message about the checkpoint from which a gang begins.

    Without a checkpoint, only if the next call uses the same folder.
    """
    if storage is None or storage.previous != storage.own:
        return f"going on from the previous attempt's checkpoint of step {step}" if step is not None else None
    if step is not None:
        return f"going on from the checkpoint of step {step} in {storage.own}"
    is_later = settings.key is None and not storage.own.endswith("-1")
    more = "; each call has a folder of its own, unless Gang(key=...) names one" if is_later else ""
    return f"starting afresh, since no checkpoint is in {storage.own}{more}"


keys = Keys()
"""Keys of this process's gangs."""


class Shards:
    """Folder to which ranks write sharded checkpoints."""

    def __init__(
        self,
        settings: Gang,
        paths: StoragePaths | None,
        disk: Path,
        filesystem: Callable[[str], Any],
        worker: Worker,
        committed: Callable[[], Collection[str]],
    ) -> None:
        """`disk` is removed with the driver's end, and holds the checkpoints if `paths` is None.

        `committed` returns the names of saves that stay.
        """
        self._filesystem = filesystem
        self._worker = worker
        self._committed = committed
        self._has_complained = False
        self.nonce = secrets.token_hex(4)
        self.base = paths.shards or paths.own if paths is not None else str(disk / "shards")
        """Path or fsspec URL. Contains a folder for each sharded checkpoint."""
        self.previous = paths.previous_shards or paths.previous if paths is not None else None
        """Folder with the sharded checkpoints of the task's previous attempt or call, perhaps `base`, or None."""
        self.token: Path | None = None
        """File by which ranks check that they share the driver's folder `base`. None for a URL."""
        if "://" not in self.base or self.base.startswith("file://"):
            self.base, self.previous = full_path(self.base), self.previous and full_path(self.previous)
            users = settings.checkpoint_uri is not None  # perhaps on a disk that the ranks' machines share
            self.token = Path(self.base if users else disk, f".driver-{secrets.token_hex(4)}")

    @functools.cached_property
    def files(self) -> Files:
        """Opened at first use, since most gangs save no sharded checkpoints."""
        return Files(self._filesystem(self.base))

    def begin(self, *, follows: bool) -> None:
        """Write `token`. If the gang `follows` the saves of earlier drivers, queue the removal of uncommitted ones."""
        if (token := self.token) is not None:
            try:
                token.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
                token.touch(mode=0o600)
            except OSError as error:
                raise unusable("Gang(checkpoint_uri=...)", str(token.parent), error) from error
        if follows and self.previous is not None:
            self._submit_removal(self.previous, lambda _, nonce: nonce != self.nonce)

    def hide(self) -> None:
        if self.token is not None:
            with contextlib.suppress(OSError):
                self.token.unlink()

    def sharding(self, start: Sequence[CheckpointEntry]) -> Sharding:
        """Return what ranks need to know. `start` are the checkpoints that they may load, the newest last."""
        token = str(self.token) if self.token is not None else None
        return Sharding(base=self.base, nonce=self.nonce, token=token, start=tuple(reversed(start)))

    def sweep(self, attempt: int, number: int) -> None:
        """Queue the removal of uncommitted saves of this driver up to a save.

        Other drivers' saves stay: they may have taken over the folder while this driver stood still.
        """
        self._submit_removal(self.base, lambda save, nonce: nonce == self.nonce and save <= (attempt, number))

    def sweep_through(self, entry: CheckpointEntry) -> None:
        if (save := save_of(entry.name)) is not None:
            self.sweep(*save[0])

    def _submit_removal(self, base: str, is_over: Callable[[tuple[int, int], str], bool]) -> None:
        self._worker.submit(lambda: self._remove(base, is_over))

    def _remove(self, base: str, is_over: Callable[[tuple[int, int], str], bool]) -> None:
        committed = self._committed()
        with self.removing(base):
            for name in {"/".join(path.split("/")[:2]) for path in self.files.below(base)}:
                if (save := save_of(name)) is not None and name not in committed and is_over(*save):
                    self.files.remove(f"{base}/{name}", OBJECT.fullmatch)

    @contextlib.contextmanager
    def removing(self, folder: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # storage clients raise errors of any class
            if not self._has_complained:
                say(
                    f"older checkpoints cannot be removed from {folder} and stay there ({type(error).__name__}: "
                    f"{error}); allow it, or have the storage expire them. New ones are kept all the same.",
                )
            self._has_complained = True


# ---- The claim that keeps two gangs from writing to one folder or URL


CLAIM = "claim.json"
_locks: weakref.WeakSet[socket.socket] = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: _close(_locks))  # a fork may outlive the gang


class Claim:
    """A gang of another machine, or one that starts after this process's end, may take over the claim."""

    def __init__(self, paths: StoragePaths, name: str, on_loss: Callable[[], object]) -> None:
        self.paths = replace(paths, prepare=self._prepare)
        """Each write first checks the claim."""
        self._prepare_storage = paths.prepare
        self._path = f"{paths.own}/{CLAIM}"
        self._about: dict[str, Any] = {
            "id": secrets.token_hex(8),
            "name": name,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": time.time(),
        }
        self._lock = socket.socket(socket.AF_UNIX)
        _locks.add(self._lock)
        self._is_written = False
        self._on_loss = on_loss
        self.loss: GangStartError | None = None

    def take(self) -> None:
        """Raises `GangStartError` if another live gang of this machine uses the folder."""
        own = self.paths.own
        try:  # a name without a file, which the kernel frees however the process ends
            self._lock.bind(f"\0daskpytorch-{os.geteuid()}-{_digest_of_place(self.paths.files, own)}")
        except OSError as error:
            other: Mapping[str, Any] = {}
            with contextlib.suppress(Exception):  # any error of a store's client
                other = self._read() or {}
            raise GangStartError(
                f"{own} is in use by {_told(other)}: two gangs would remove each other's checkpoints. "
                "Wait for its end, or give this gang another Gang(key=...) or Gang(checkpoint_uri=...)."
            ) from error
        try:
            if (holder := self._read()) is not None:
                say(f"{own}: taken over from {_told(holder)}, which writes nothing more there")
            self.paths.files.write(self._path, json.dumps(self._about).encode())
            self._is_written = True
        except Exception as error:  # any error of a store's client: the gang works without a claim
            say(
                f"{own} could not be claimed ({type(error).__name__}: {error}). Make sure that no other gang has the "
                "same key and checkpoint_uri: two such gangs would remove each other's checkpoints."
            )

    def release(self) -> None:
        """Remove the claim, unless a newer gang has taken over the folder."""
        with contextlib.suppress(Exception):  # any error of a store's client: the next gang takes the claim over
            if self._is_written and (self._read() or {}).get("id") == self._about["id"]:
                self.paths.files.fs.rm_file(self._path)
        self._lock.close()

    def _prepare(self) -> None:
        holder = self._read() if self._is_written else None
        if holder and holder.get("id") != self._about["id"]:
            self.loss = GangStartError(
                f"{self.paths.own} was taken over by {_told(holder)}. Nothing more is written there. If both gangs are "
                "to train, give each a Gang(key=...) of its own."
            )
            self._on_loss()
            raise self.loss
        self._prepare_storage()

    def _read(self) -> dict[str, Any] | None:
        """Return the folder's claim, perhaps of another gang. Empty: unreadable."""
        self.paths.files.fs.invalidate_cache()
        try:
            content = json.loads(self.paths.files.read(self._path))
        except FileNotFoundError:
            return None
        except ValueError:  # empty or cut off, as after a crash of its machine
            return {}
        return content if isinstance(content, dict) else {}


@contextlib.contextmanager
def claimed(
    paths: StoragePaths | None, name: str, on_loss: Callable[[], object] = lambda: None
) -> Iterator[StoragePaths | None]:
    """Hold a claim on a gang's checkpoint folder, if other gangs may get the same folder. `name` is for their messages.

    `on_loss` is called in the thread that writes to storage, after a newer gang has taken over the folder.

    Raises `GangStartError` if another live gang of this machine uses the folder, or a newer gang has taken it over.
    """
    if paths is None or not paths.is_claimed:
        yield paths
        return
    claim = Claim(paths, name, on_loss)
    try:
        claim.take()
        yield claim.paths
    except Exception as error:
        if claim.loss is not None:
            raise claim.loss from error
        raise
    finally:
        claim.release()


def _close(locks: Iterable[socket.socket]) -> None:
    for lock in locks:
        lock.close()


def _digest_of_place(files: Files, folder: str) -> str:
    """Two servers on one machine, or its network, may have a bucket of the same name."""
    server = f"{files.fs.storage_options} {os.environ.get('AWS_ENDPOINT_URL')}"
    place = os.path.realpath(folder) if files.is_local else f"{folder} {server}"
    return hashlib.sha256(place.encode()).hexdigest()[:32]


def _told(holder: Mapping[str, Any]) -> str:
    if "since" not in holder:
        return "a gang whose claim cannot be read"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(holder["since"]))
    return f"{holder['name']} on {holder['host']} (process {holder['pid']}), which began at {since} UTC by its clock"
