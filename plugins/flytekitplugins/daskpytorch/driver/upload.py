"""Checkpoints in Flyte's storage, for the task's next attempt. Runs in the driver, in a thread of its own.

An attempt finds the one before it by path. So its own manifest names at once what it was given, where that lies: an
attempt that dies before its first checkpoint passes it on. Then the newest and the best are copied to its own folder.
A manifest is written after the files that it names, and before those that it names no longer are removed.
"""

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

from flytekitplugins.daskpytorch.driver.manifest import Manifest, read_manifest
from flytekitplugins.daskpytorch.driver.retention import retained
from flytekitplugins.daskpytorch.process.log import say
from flytekitplugins.daskpytorch.protocol.best import best_first
from flytekitplugins.daskpytorch.protocol.checkpoint_file import CheckpointFile, digest_of
from flytekitplugins.daskpytorch.protocol.host import StoragePaths
from flytekitplugins.daskpytorch.settings import Keep

RETRY_AFTER = 2.0
"""Seconds before storage that failed is tried again; doubled each time, up to a minute."""
MAX_READ_ATTEMPTS = 5
"""How often storage is asked for the previous checkpoint before the training starts afresh."""
T = TypeVar("T")


class StorageUpload:
    """Copies the newest checkpoint to storage, and the best; one at a time, and the training never waits for it."""

    def __init__(self, paths: StoragePaths, keep: Keep | None = None, retry_after: float = RETRY_AFTER) -> None:
        self._paths = paths
        self.own = paths.own
        """The folder of this attempt."""
        self._keep = keep or Keep()
        self._retry_after = retry_after
        self._changed = threading.Condition()
        self._known: dict[str, CheckpointFile] = {}
        """By name, in the order in which they were kept: those in storage that count, and those that may go there."""
        self._sources: dict[str, Path] = {}
        """Where those are on the disk that are not in this attempt's folder."""
        self._folders: dict[str, str] = {}
        """Where those are in storage that are there: in this attempt's folder, or still in an earlier one's."""
        self.manifest = Manifest(paths)
        """This attempt's."""
        self._written: list[CheckpointFile] = []
        """What it names for certain."""
        self._is_busy = False
        self._copying: CheckpointFile | None = None
        self._is_turn_of_best = False
        self._is_urgent = False
        """Somebody waits: the pauses between attempts stay short."""
        self._closed = False
        self._has_complained = False
        threading.Thread(target=self._work, name="daskpytorch-storage", daemon=True).start()

    def restore(self, folder: Path) -> list[CheckpointFile]:
        """Fetch the newest whole checkpoint of the attempt before, and its best ones, in the order they were kept in.

        The last is what to go on from; there is none on a first attempt, and where none is whole.
        """
        previous = self._paths.previous
        if not previous:
            return []
        found: list[CheckpointFile] = []
        listed: list[CheckpointFile] = []
        damaged: set[str] = set()
        try:
            named = self._patiently(functools.partial(read_manifest, self._paths.file_access, previous))
            listed, self.manifest.sharded = named or ([], [])
            self.manifest.is_known = named is not None
            listed = [replace(file, attempt=0, folder=file.folder or previous) for file in listed]
            best = best_first(reversed(listed), self._keep)[: self._keep.best]
            for file in listed:
                if found and file not in best:
                    continue
                if self._patiently(functools.partial(self._fetch_whole, file, folder)):
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
        if found:
            self._take_over(listed, damaged)
        return found

    def offer(self, file: CheckpointFile, path: Path) -> None:
        """Copy this one next; one that still waits for its turn is passed over, unless it is among the best."""
        with self._changed:
            self._known.pop(file.name, None)
            self._known[file.name] = file
            if self._folders.get(file.name) != self._paths.own:
                self._sources[file.name] = path
            copying = [self._copying] if self._copying is not None else []
            stay = {*self._folders, *(other.name for other in [*self._wanted(), *copying])}
            self._known = {name: known for name, known in self._known.items() if name in stay}
            self._sources = {name: source for name, source in self._sources.items() if name in stay}
            self._changed.notify_all()

    def supply(self, paths: Mapping[str, Path]) -> None:
        """Copy what the attempt before has left, too, by name; its order, by which the newest is known, stays."""
        with self._changed:
            self._sources |= {name: path for name, path in paths.items() if self._folders.get(name) != self._paths.own}
            self._changed.notify_all()

    def flush(self, timeout: float) -> bool:
        """Wait until all is copied; whether the newest was in time."""
        with self._changed:
            self._is_urgent = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._has_work() and not self._is_busy, timeout)
            newest = next(reversed(self._known), None)
            return newest is None or newest in {file.name for file in self._written}

    def close(self) -> None:
        """Copy nothing more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # ---- what there is to do

    def _wanted(self) -> list[CheckpointFile]:
        """What is to be in this attempt's folder, the most urgent first."""
        known = list(self._known.values())
        best = best_first(known, self._keep)[: self._keep.best]
        return [*known[-1:], *(file for file in best if file is not known[-1])]

    def _next(self) -> CheckpointFile | None:
        """What is to be copied next: by turns the newest and one of the best, which newer ones would keep waiting."""
        waiting = [file for file in self._wanted() if file.name in self._sources]
        if len(waiting) > 1 and self._is_turn_of_best and not self._is_urgent:
            return waiting[1]
        return waiting[0] if waiting else None

    def _listed(self) -> list[CheckpointFile]:
        """What the manifest is to name, the newest first, and where those are that are not beside it."""
        stored = [file for name, file in self._known.items() if name in self._folders]
        listed = [(file, self._folders[file.name]) for file in reversed(retained(stored, self._keep))]
        return [replace(file, folder=None if folder == self._paths.own else folder) for file, folder in listed]

    def _has_news(self) -> bool:
        """Whether the manifest is to be written."""
        listed = self._listed()
        return bool(listed) and [*map(asdict, listed)] != [*map(asdict, self._written)]

    def _has_work(self) -> bool:
        return self._has_news() or self._next() is not None

    def _work(self) -> None:
        wait = self._retry_after
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._has_work())
                if self._closed:
                    return
                file = self._copying = None if self._has_news() else self._next()
                if file is not None:
                    self._is_turn_of_best = not self._is_turn_of_best
                self._is_busy = True
            try:
                self._write_manifest() if file is None else self._copy(file)
                wait = self._retry_after
            except Exception as error:  # whatever a store's client raises: the training goes on without it
                if file is not None and self._has_gone(file):  # a newer one has taken its place meanwhile
                    continue
                self._complain(error, file, wait)
                with self._changed:
                    if self._is_urgent:
                        self._changed.wait_for(lambda: self._closed, self._retry_after)
                    else:
                        self._changed.wait_for(lambda: self._closed or self._is_urgent, wait)
                wait = min(60.0, 2 * wait)
            finally:
                with self._changed:
                    self._is_busy, self._copying = False, None
                    self._changed.notify_all()

    def _complain(self, error: Exception, file: CheckpointFile | None, wait: float) -> None:
        with self._changed:
            step = (file or self._listed()[0]).step
        say(
            f"the checkpoint of step {step} could not be copied to {self._paths.own} "
            f"({type(error).__name__}: {error}); trying again in {wait:g} s. The training goes on.",
        )

    # ---- doing it

    def _copy(self, file: CheckpointFile) -> None:
        self._paths.file_access.put_data(str(self._sources[file.name]), f"{self._paths.own}/{file.name}")
        with self._changed:
            self._folders[file.name] = self._paths.own
            self._sources.pop(file.name, None)

    def _has_gone(self, file: CheckpointFile) -> bool:
        """Whether it is not on the disk any more; then it is not to be copied."""
        with self._changed:
            source = self._sources.get(file.name)
            has_gone = source is None or not source.exists()
            if has_gone:
                self._sources.pop(file.name, None)
                if file.name not in self._folders:
                    self._known.pop(file.name, None)
        return has_gone

    def _write_manifest(self) -> None:
        with self._changed:
            listed = self._listed()
        self.manifest.write(files=listed)
        with self._changed:
            self._written = listed
            names = {file.name for file in listed}
            dropped = {name: folder for name, folder in self._folders.items() if name not in names}
            for name in dropped:
                del self._folders[name]
                if name not in self._sources:
                    self._known.pop(name, None)
        for name, folder in dropped.items():
            if folder == self._paths.own:  # what an earlier attempt has there, its manifest names
                self._remove(name)

    def _remove(self, name: str) -> None:
        """Free its space; where that is not allowed or fails, say so the first time: nothing needs it to be gone."""
        own = self._paths.own
        try:
            self._paths.file_access.get_filesystem_for_path(own).rm_file(f"{own}/{name}")
        except Exception as error:  # whatever a store's client raises
            if not self._has_complained:
                say(
                    f"older checkpoints cannot be removed from {own} and stay there ({type(error).__name__}: {error}); "
                    "allow it, or have the storage expire them. The newest are copied all the same.",
                )
            self._has_complained = True

    # ---- of the attempt before

    def _take_over(self, listed: Sequence[CheckpointFile], damaged: set[str]) -> None:
        """Have this attempt's manifest name what that of the one before does, where it is."""
        with self._changed:
            for file in reversed(listed):
                where = file.folder or self._paths.own
                if file.name not in damaged:
                    self._known[file.name] = file
                if file.name not in damaged or where == self._paths.own:  # there it is to be removed
                    self._folders[file.name] = where
            self.manifest.files = self._listed()  # whoever else writes it first names them, too
            self._changed.notify_all()

    def _fetch_whole(self, file: CheckpointFile, folder: Path) -> bool:
        target = folder / file.name
        self._fetch(f"{file.folder}/{file.name}", target)
        return target.is_file() and digest_of(target) == file.digest

    def _fetch(self, remote: str, to: Path) -> None:
        if self._paths.file_access.get_filesystem_for_path(remote).exists(remote):
            self._paths.file_access.get_data(remote, str(to))

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
