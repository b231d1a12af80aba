"""A gang's checkpoints in storage, for the task's next attempt or for the next call. Runs in the driver.

    manifest.json: {"checkpoints": [...], "sharded": [...]}    the newest first; "sharded" is missing if there are none

A checkpoint counts once the manifest names the checkpoint. The manifest is one small object. The driver writes new
files first, then the manifest, and removes old files last. Whole checkpoints are files beside the manifest, or in their
entry's `folder`. Sharded checkpoints are folders.

An attempt finds the previous attempt by path. The new attempt first writes a manifest that names the previous attempt's
checkpoints in their old folders. So checkpoints survive attempts that die before their first checkpoint. Then the
driver copies the newest whole checkpoint and the best to the new attempt's folder. Sharded checkpoints stay in their
folders.
"""

import contextlib
import functools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from flytekitplugins.daskpytorch.driver.retention import best_first, retained
from flytekitplugins.daskpytorch.process.log import say
from flytekitplugins.daskpytorch.process.worker import RETRY_AFTER, Worker
from flytekitplugins.daskpytorch.protocol.checkpoint_file import CheckpointFile, digest_of
from flytekitplugins.daskpytorch.protocol.files import Files
from flytekitplugins.daskpytorch.protocol.host import StoragePaths
from flytekitplugins.daskpytorch.protocol.sharded import ShardedCheckpoint
from flytekitplugins.daskpytorch.settings import Keep

MANIFEST = "manifest.json"
MAX_READ_ATTEMPTS = 5
"""Maximum number of tries per object of the previous attempt. Afterwards training starts without this object."""
LANE = "files"
"""Lane of the vault's jobs in the `Worker`."""
Named = tuple[list[CheckpointFile], list[ShardedCheckpoint]]
"""Whole and sharded checkpoints of a manifest, each with the newest first."""
T = TypeVar("T")


@dataclass
class _Known:
    """A whole checkpoint in storage, or waiting for its copy."""

    file: CheckpointFile
    source: Path | None
    """File on the driver's disk to copy. None if this attempt's folder has a copy, or the file is gone."""
    folder: str | None = None
    """Folder in storage, perhaps an earlier attempt's. None if the checkpoint is not in storage."""


class Vault:
    """Copies whole checkpoints to storage, and names both kinds in the manifest. Training never waits for storage."""

    def __init__(
        self, paths: StoragePaths | None, keep: Keep, worker: Worker | None = None, retry_after: float = RETRY_AFTER
    ) -> None:
        """Make a gang's vault.

        Args:
            paths: Folders of the previous attempt's and this attempt's checkpoints. None disables storage.
            keep: Retention policy.
            worker: Makes all writes to storage. None creates a new worker.
            retry_after: Pause before the first retry, in seconds. Each further retry doubles the pause.
        """
        self._paths = paths
        self.own = paths.own if paths is not None else None
        """This attempt's folder in storage. None without storage."""
        self.keep = keep
        """Retention policy."""
        self.worker = worker or Worker(retry_after)
        """Makes all writes to storage."""
        self._retry_after = retry_after
        self._lock = threading.RLock()
        self._known: dict[str, _Known] = {}
        """Name -> whole checkpoint, oldest first."""
        self._copying: str | None = None
        """Name of the checkpoint being copied, or None."""
        self._is_turn_of_best = False
        self._is_at_work = False
        """True while the worker has a vault job."""
        self.sharded: list[ShardedCheckpoint] = []
        """Kept sharded checkpoints, in commit order."""
        self._written = _manifest_of([], [])
        """Content of the last manifest whose write has succeeded. An empty manifest before the first write."""
        self._stored: frozenset[str] = frozenset()
        """Names of the whole checkpoints in `_written`."""
        self._leftovers: set[str] = set()
        """Names of files to remove from this attempt's folder: damaged files, and files that left the manifest."""
        self.is_known = False
        """True after reading the previous attempt's manifest. Otherwise the driver cannot tell which old files to
        keep."""
        self.is_in_doubt = False
        """True from the start of a manifest write until its success. Meanwhile storage may hold either manifest."""
        self._has_complained = False

    def restore(self, folder: Path) -> list[CheckpointFile]:
        """Fetch the previous attempt's newest undamaged whole checkpoint and its best.

        The next manifest repeats the previous manifest's sharded checkpoints. After a successful fetch, the next
        manifest also repeats undamaged whole checkpoints.

        Args:
            folder: Folder on the driver's disk for the fetched files.

        Returns:
            Fetched checkpoints, oldest first. Training begins from the last checkpoint.
        """
        if self._paths is None or self._paths.previous is None:
            return []
        previous = self._paths.previous
        found: list[CheckpointFile] = []
        listed: list[CheckpointFile] = []
        damaged: set[str] = set()
        try:
            named = self._patiently(functools.partial(read_manifest, self._paths.files, previous))
            listed, sharded = named or ([], [])
            self.sharded, self.is_known = sharded[::-1], named is not None
            listed = [replace(file, attempt=0, folder=file.folder or previous) for file in listed]
            best = best_first(reversed(listed), self.keep)[: self.keep.best]
            for file in listed:
                if found and file not in best:
                    continue
                if self._patiently(functools.partial(_fetch, self._paths.files, file, folder / file.name)):
                    found.insert(0, file)
                else:
                    damaged.add(file.name)
                    say(
                        f"the previous attempt's checkpoint of step {file.step} is incomplete or damaged, and is not "
                        "used"
                    )
        except Exception as error:  # storage clients raise errors of any class
            goes_on = f"goes on from step {found[-1].step}" if found else "starts afresh"
            say(
                f"the previous attempt's checkpoints at {previous} cannot be read ({type(error).__name__}: {error}); "
                f"the training {goes_on}",
            )
        with self._lock:
            for file in reversed(listed if found else []):
                if file.name not in damaged:
                    source = folder / file.name if file in found and file.folder != self.own else None
                    self._known[file.name] = _Known(file, source, file.folder)
                elif file.folder == self.own:
                    self._leftovers.add(file.name)
            self._go_on()
        return found

    def offer(self, file: CheckpointFile, path: Path) -> None:
        """Queue a whole checkpoint for the copy to storage.

        Waiting checkpoints leave the queue, unless they are among the best.

        Args:
            file: The checkpoint.
            path: Path of its file on the driver's disk.
        """
        if self._paths is None:
            return
        with self._lock:
            before = self._known.pop(file.name, None)
            folder = before.folder if before is not None else None
            self._known[file.name] = _Known(file, None if folder == self.own else path, folder)
            stay = {self._copying, *(known.file.name for known in self._wanted())}
            self._known = {name: known for name, known in self._known.items() if known.folder or name in stay}
            self._go_on()

    def flush(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for all copies. Return True if storage has the newest whole checkpoint."""
        self.worker.flush(LANE, timeout)
        with self._lock:
            newest = next(reversed(self._known), None)
            return newest is None or newest in self._stored

    def name(self, sharded: list[ShardedCheckpoint]) -> None:
        """Write a manifest that names these sharded checkpoints.

        Args:
            sharded: All sharded checkpoints to keep, in commit order.

        Raises:
            Exception: Any error of the storage's client.
        """
        if self._paths is not None:
            self._write_manifest(self._paths, sharded)
        self.sharded = sharded

    # ---- what there is to do

    def _go_on(self) -> None:
        if self._paths is not None and not self._is_at_work and (self._has_news() or self._next() is not None):
            self._is_at_work = True
            self.worker.submit(LANE, functools.partial(self._work, self._paths), self._tell_failure)

    def _wanted(self) -> list[_Known]:
        """Return checkpoints for this attempt's folder: newest first, then best."""
        known = list(self._known.values())
        best = best_first([each.file for each in known], self.keep)[: self.keep.best]
        return [*known[-1:], *(self._known[file.name] for file in best if file is not known[-1].file)]

    def _next(self) -> _Known | None:
        """Return the checkpoint to copy next, or None.

        The newest and the best take turns. Otherwise frequent saves would keep the best out of storage.
        """
        waiting = [known for known in self._wanted() if known.source is not None]
        if len(waiting) > 1 and self._is_turn_of_best and not self.worker.is_urgent:
            return waiting[1]
        return waiting[0] if waiting else None

    def _listed(self) -> list[CheckpointFile]:
        """Return the whole checkpoints for the next manifest, the newest first."""
        stored = [known.file for known in self._known.values() if known.folder is not None]
        listed = [(file, self._known[file.name].folder) for file in reversed(retained(stored, self.keep))]
        return [replace(file, folder=None if folder == self.own else folder) for file, folder in listed]

    def _has_news(self) -> bool:
        return _manifest_of(self._listed(), self.sharded) != self._written

    # ---- in the worker's thread

    def _work(self, paths: StoragePaths) -> None:
        """Write a changed manifest, or else copy one file."""
        with self._lock:
            has_news, known = self._has_news(), self._next()
            self._copying = None if has_news or known is None else known.file.name
            if self._copying is not None:
                self._is_turn_of_best = not self._is_turn_of_best
        if has_news:
            self._write_manifest(paths, self.sharded)
        elif known is not None and known.source is not None:
            self._copy(paths, known.file.name, known.source)
        with self._lock:
            self._is_at_work, self._copying = False, None
            self._go_on()

    def _copy(self, paths: StoragePaths, name: str, source: Path) -> None:
        folder: str | None = paths.own
        try:
            paths.prepare()
            paths.files.put(source, f"{paths.own}/{name}")
        except Exception:
            if source.exists():
                raise
            folder = None  # the driver has removed the file for a newer checkpoint
        with self._lock:
            known = self._known[name]
            known.source, known.folder = None, folder or known.folder
            if known.folder is None:
                del self._known[name]

    def _write_manifest(self, paths: StoragePaths, sharded: Sequence[ShardedCheckpoint]) -> None:
        with self._lock:
            listed = self._listed()
            names = frozenset(file.name for file in listed)
            dropped = [known for name, known in self._known.items() if known.folder is not None and name not in names]
        content = _manifest_of(listed, sharded)
        paths.prepare()
        self.is_in_doubt = True
        paths.files.write(f"{paths.own}/{MANIFEST}", content)
        self.is_in_doubt = False
        with self._lock:
            self._written, self._stored = content, names
            for known in dropped:
                if self._known.get(known.file.name) is known:  # else the checkpoint was saved again
                    if known.folder == paths.own:  # an earlier attempt's manifest still names its own files
                        self._leftovers.add(known.file.name)
                    known.folder = None
                    if known.source is None:
                        del self._known[known.file.name]
        while self._leftovers:
            with self.removing(paths.own):
                paths.files.fs.rm_file(f"{paths.own}/{self._leftovers.pop()}")

    @contextlib.contextmanager
    def removing(self, folder: str) -> Iterator[None]:
        """Suppress errors when removing files from a folder, and log the first error.

        New checkpoints do not need the removal.
        """
        try:
            yield
        except Exception as error:  # storage clients raise errors of any class
            if not self._has_complained:
                say(
                    f"older checkpoints cannot be removed from {folder} and stay there ({type(error).__name__}: "
                    f"{error}); allow it, or have the storage expire them. New ones are kept all the same.",
                )
            self._has_complained = True

    def _tell_failure(self, error: Exception, _: int, pause: float) -> bool:
        with self._lock:
            steps = [known.file.step for name, known in self._known.items() if name == self._copying]
            steps += [file.step for file in self._listed()] + [entry.step for entry in self.sharded[::-1]]
        say(
            f"the checkpoint of step {steps[0]} could not be copied to {self.own} ({type(error).__name__}: {error}); "
            f"trying again in {pause:g} s. The training goes on.",
        )
        return False

    def _patiently(self, read: Callable[[], T]) -> T:
        wait = self._retry_after
        for _ in range(MAX_READ_ATTEMPTS - 1):
            try:
                return read()
            except Exception as error:
                say(f"the previous checkpoint cannot be read yet ({error}); trying again")
                time.sleep(wait)
                wait *= 2
        return read()


def _fetch(files: Files, file: CheckpointFile, target: Path) -> bool:
    """Download a checkpoint, and return True if the file exists and its digest matches."""
    with contextlib.suppress(FileNotFoundError):
        files.get(f"{file.folder}/{file.name}", target)
    return target.is_file() and digest_of(target) == file.digest


def _manifest_of(files: Sequence[CheckpointFile], sharded: Sequence[ShardedCheckpoint]) -> bytes:
    """Return the content of a manifest. The newest of `files` comes first, the newest of `sharded` last."""
    named = {"checkpoints": [asdict(entry) for entry in files]}
    named |= {"sharded": [asdict(entry) for entry in reversed(sharded)]} if sharded else {}
    return json.dumps(named).encode()


def read_manifest(files: Files, folder: str) -> Named | None:
    """Return the checkpoints named by a folder's manifest. Without a manifest, return empty lists.

    None for an incomplete or newer manifest.

    Raises:
        Exception: Any error of the storage's client but `FileNotFoundError`.
    """
    try:
        content = files.read(f"{folder}/{MANIFEST}")
    except FileNotFoundError:
        return [], []
    return named_in(content)


def named_in(manifest: bytes) -> Named | None:
    """Return the checkpoints in a manifest, the newest first. None for an incomplete or newer manifest."""
    try:
        named = json.loads(manifest)
        return (
            [CheckpointFile(**entry | {"metrics": _numbers(entry)}) for entry in named["checkpoints"]],
            [ShardedCheckpoint(**entry) for entry in named.get("sharded", ())],
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _numbers(entry: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in entry.get("metrics", {}).items()}
