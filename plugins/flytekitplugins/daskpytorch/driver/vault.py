"""What of a gang's checkpoints lies in storage, for the task's next attempt or the next call. Runs in the driver.

    manifest.json: {"checkpoints": [...], "sharded": [...]}    the newest first; "sharded" is missing if there are none

A checkpoint counts once the manifest names it. The manifest is one small object, which is written after the files that
it names, and before those that it names no longer are removed. Whole checkpoints lie beside it, or in the `folder` of
their entry; sharded ones are named by their folders.

An attempt finds the one before it by path. So its own manifest names at once what it was given, where that lies: an
attempt that dies before its first checkpoint passes it on. Then the newest whole checkpoint and the best are copied to
its own folder. Sharded ones stay where they are.
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
from flytekitplugins.daskpytorch.driver.worker import RETRY_AFTER, Worker
from flytekitplugins.daskpytorch.process.log import say
from flytekitplugins.daskpytorch.protocol.checkpoint_file import CheckpointFile, digest_of
from flytekitplugins.daskpytorch.protocol.files import Files
from flytekitplugins.daskpytorch.protocol.host import StoragePaths
from flytekitplugins.daskpytorch.protocol.sharded import ShardedCheckpoint
from flytekitplugins.daskpytorch.settings import Keep

MANIFEST = "manifest.json"
MAX_READ_ATTEMPTS = 5
"""Tries to read each object of the attempt before; after that the training starts without the object."""
LANE = "files"
Named = tuple[list[CheckpointFile], list[ShardedCheckpoint]]
T = TypeVar("T")


@dataclass
class _Known:
    """A whole checkpoint that is in storage, or is to be copied there."""

    file: CheckpointFile
    source: Path | None
    """The file on the driver's disk; None if it is in this attempt's folder, or is gone."""
    folder: str | None = None
    """Its folder in storage, of this attempt or an earlier one; None if it is not in storage."""


class Vault:
    """Names checkpoints of both kinds in the manifest, and copies whole ones to storage; the training never waits."""

    def __init__(
        self, paths: StoragePaths | None, keep: Keep, worker: Worker | None = None, retry_after: float = RETRY_AFTER
    ) -> None:
        """Make a gang's vault.

        Args:
            paths: Where checkpoints come from and go to; None: nothing is stored, since nobody will look for it.
            keep: Which of them stay.
            worker: Does all that writes to storage.
            retry_after: Seconds before storage that failed is tried again, doubled each time.
        """
        self._paths = paths
        self.own = paths.own if paths is not None else None
        """This attempt's folder in storage."""
        self.keep = keep
        """Which checkpoints stay."""
        self.worker = worker or Worker(retry_after)
        """Does all that writes to storage."""
        self._retry_after = retry_after
        self._lock = threading.RLock()
        self._known: dict[str, _Known] = {}
        """Whole checkpoints by name, in the order in which they were kept."""
        self._copying: str | None = None
        """Name of the checkpoint that is being copied."""
        self._is_turn_of_best = False
        self._is_at_work = False
        """True if the worker has a job of this vault."""
        self.sharded: list[ShardedCheckpoint] = []
        """Sharded checkpoints that count, in the order in which they were committed."""
        self._written = _manifest_of([], [])
        """Content of the manifest that storage has for certain."""
        self._stored: frozenset[str] = frozenset()
        """Names of the whole checkpoints in that manifest."""
        self._leftovers: set[str] = set()
        """Damaged files in this attempt's own folder, which the attempt before has named."""
        self.is_known = False
        """True if the manifest of the attempt before could be read, so that what no manifest names can be told."""
        self.is_in_doubt = False
        """True while a manifest write has neither succeeded nor failed, so that storage may hold the old or the new."""
        self._has_complained = False

    def restore(self, folder: Path) -> list[CheckpointFile]:
        """Fetch the newest undamaged whole checkpoint of the attempt before, and its best, in the order they were kept.

        The last one is where to go on from. All that the manifest of the attempt before names is taken over.
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
                    say(f"the previous attempt's checkpoint of step {file.step} is not whole")
        except Exception as error:  # whatever a store's client raises: the training can start without it
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
        """Copy this one next; one that still waits for its turn is passed over, unless it is among the best."""
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
        """Wait until all is copied, or for `timeout` seconds; return True if the newest whole checkpoint is stored."""
        self.worker.flush(LANE, timeout)
        with self._lock:
            newest = next(reversed(self._known), None)
            return newest is None or newest in self._stored

    def name(self, sharded: list[ShardedCheckpoint]) -> None:
        """Have the manifest name these sharded checkpoints, in the order in which they were committed.

        Raises:
            Exception: Whatever a store's client raises.
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
        """Return what is to be in this attempt's folder, the most urgent first."""
        known = list(self._known.values())
        best = best_first([each.file for each in known], self.keep)[: self.keep.best]
        return [*known[-1:], *(self._known[file.name] for file in best if file is not known[-1].file)]

    def _next(self) -> _Known | None:
        """Return what is to be copied next: by turns the newest and one of the best, which newer ones would hold up."""
        waiting = [known for known in self._wanted() if known.source is not None]
        if len(waiting) > 1 and self._is_turn_of_best and not self.worker.is_urgent:
            return waiting[1]
        return waiting[0] if waiting else None

    def _listed(self) -> list[CheckpointFile]:
        """Return the whole checkpoints that the manifest is to name, the newest first."""
        stored = [known.file for known in self._known.values() if known.folder is not None]
        listed = [(file, self._known[file.name].folder) for file in reversed(retained(stored, self.keep))]
        return [replace(file, folder=None if folder == self.own else folder) for file, folder in listed]

    def _has_news(self) -> bool:
        return _manifest_of(self._listed(), self.sharded) != self._written

    # ---- in the worker's thread

    def _work(self, paths: StoragePaths) -> None:
        """Write the manifest, or copy a file."""
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
            folder = None  # a newer one has taken its place on the driver's disk
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
                if self._known.get(known.file.name) is known:  # it has not been saved again meanwhile
                    if known.folder == paths.own:  # what an earlier attempt has in its folder, its manifest names
                        self._leftovers.add(known.file.name)
                    known.folder = None
                    if known.source is None:
                        del self._known[known.file.name]
        while self._leftovers:
            with self.removing(paths.own):
                paths.files.fs.rm_file(f"{paths.own}/{self._leftovers.pop()}")

    @contextlib.contextmanager
    def removing(self, folder: str) -> Iterator[None]:
        """Remove something below; where that is not allowed or fails, say so once: nothing needs it to be gone."""
        try:
            yield
        except Exception as error:  # whatever a store's client raises
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
    """Download a checkpoint; return True if it is whole."""
    with contextlib.suppress(FileNotFoundError):
        files.get(f"{file.folder}/{file.name}", target)
    return target.is_file() and digest_of(target) == file.digest


def _manifest_of(files: Sequence[CheckpointFile], sharded: Sequence[ShardedCheckpoint]) -> bytes:
    """Return the content of a manifest. The newest of `files` comes first, the newest of `sharded` last."""
    named = {"checkpoints": [asdict(entry) for entry in files]}
    named |= {"sharded": [asdict(entry) for entry in reversed(sharded)]} if sharded else {}
    return json.dumps(named).encode()


def read_manifest(files: Files, folder: str) -> Named | None:
    """Return what a folder's manifest names: nothing without a manifest, None if it is torn or of a later version.

    Raises:
        Exception: Whatever a store's client raises.
    """
    try:
        content = files.read(f"{folder}/{MANIFEST}")
    except FileNotFoundError:
        return [], []
    return named_in(content)


def named_in(manifest: bytes) -> Named | None:
    """Return what a manifest names, the newest first; None if it is torn or of a later version."""
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
