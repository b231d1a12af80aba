"""Checkpoints in Flyte's storage, for the task's next attempt. Runs in the driver, in a thread of its own.

An attempt finds the one before it by path. So what it started from is written to its own path at once: an attempt
that dies before its first checkpoint passes on what it was given. A manifest, written last, names the files.
"""

import functools
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from flytekitplugins.daskpytorch.driver.manifest import Manifest, read_manifest
from flytekitplugins.daskpytorch.protocol.checkpoint_file import CheckpointFile, digest_of
from flytekitplugins.daskpytorch.protocol.host import StoragePaths

__all__ = ["StorageUpload"]

NUM_KEPT = 2
"""How many checkpoints the manifest names: the newest, and one before it should it turn out to be damaged."""
RETRY_AFTER = 2.0
"""Seconds before storage that failed is tried again; doubled each time, up to a minute."""
MAX_READ_ATTEMPTS = 5
"""How often storage is asked for the previous checkpoint before the training starts afresh."""
T = TypeVar("T")


class StorageUpload:
    """Copies the newest checkpoint to storage; one copy at a time, and the training never waits for it."""

    def __init__(self, paths: StoragePaths, retry_after: float = RETRY_AFTER) -> None:
        self._paths = paths
        self._retry_after = retry_after
        self._changed = threading.Condition()
        self._offered: tuple[CheckpointFile, Path] | None = None
        self.manifest = Manifest(paths)
        self._is_busy = False
        self._is_urgent = False
        """Somebody waits: the pauses between attempts stay short."""
        self._closed = False
        self._has_complained = False
        threading.Thread(target=self._copy_all, name="daskpytorch-storage", daemon=True).start()

    def restore(self, folder: Path) -> CheckpointFile | None:
        """Fetch the newest whole checkpoint of the attempt before; None where there is none, or none that is whole."""
        previous = self._paths.previous
        if not previous:
            return None
        try:
            named = self._patiently(functools.partial(read_manifest, self._paths.file_access, previous))
            files, self.manifest.sharded = named or ([], [])
            self.manifest.is_known = named is not None
            if previous == self._paths.own:  # what is there already need not be copied, and is to be removed some day
                self.manifest.files = files
            for file in files:
                target = folder / file.name
                self._patiently(functools.partial(self._fetch, f"{previous}/{file.name}", target))
                if target.is_file() and digest_of(target) == file.digest:
                    return CheckpointFile(**asdict(file) | {"attempt": 0})
                print(f"the previous attempt's checkpoint of step {file.step} is not whole", file=sys.stderr)
        except Exception as error:  # whatever a store's client raises: the training can start without it
            print(
                f"the previous attempt's checkpoints at {previous} cannot be read ({type(error).__name__}: {error}); "
                "the training starts afresh",
                file=sys.stderr,
            )
        return None

    def offer(self, file: CheckpointFile, path: Path) -> None:
        """Copy this one next; one that still waits for its turn is passed over."""
        with self._changed:
            self._offered = (file, path)
            self._changed.notify_all()

    def flush(self, timeout: float) -> bool:
        """Wait until all is copied; whether it was in time."""
        with self._changed:
            self._is_urgent = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._offered is None and not self._is_busy, timeout)

    def close(self) -> None:
        """Copy nothing more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _copy_all(self) -> None:
        wait = self._retry_after
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._offered is not None or self._closed)
                if self._closed or self._offered is None:
                    return
                (file, path), self._offered, self._is_busy = self._offered, None, True
            try:
                self._copy(file, path)
                wait = self._retry_after
            except Exception as error:  # whatever a store's client raises: the training goes on without it
                if not path.exists():  # a newer one has taken its place meanwhile
                    continue
                print(
                    f"the checkpoint of step {file.step} could not be copied to {self._paths.own} "
                    f"({type(error).__name__}: {error}); trying again in {wait:g} s. The training goes on.",
                    file=sys.stderr,
                )
                with self._changed:
                    self._offered = self._offered or (file, path)
                    if self._is_urgent:
                        self._changed.wait_for(lambda: self._closed, self._retry_after)
                    else:
                        self._changed.wait_for(lambda: self._closed or self._is_urgent, wait)
                wait = min(60.0, 2 * wait)
            finally:
                with self._changed:
                    self._is_busy = False
                    self._changed.notify_all()

    def _copy(self, file: CheckpointFile, path: Path) -> None:
        own, access, before = self._paths.own, self._paths.file_access, self.manifest.files
        if all(file.name != other.name for other in before):
            access.put_data(str(path), f"{own}/{file.name}")
        listed = [file, *(other for other in before if other.name != file.name)]
        self.manifest.write(files=listed[:NUM_KEPT])
        for old in listed[NUM_KEPT:]:
            self._remove(old)

    def _remove(self, old: CheckpointFile) -> None:
        """Free its space; where that is not allowed or fails, say so the first time: nothing needs it to be gone."""
        own = self._paths.own
        try:
            self._paths.file_access.get_filesystem_for_path(own).rm_file(f"{own}/{old.name}")
        except Exception as error:  # whatever a store's client raises
            if not self._has_complained:
                print(
                    f"older checkpoints cannot be removed from {own} and stay there ({type(error).__name__}: {error}); "
                    "allow it, or have the storage expire them. The newest are copied all the same.",
                    file=sys.stderr,
                )
            self._has_complained = True

    def _fetch(self, remote: str, to: Path) -> None:
        if self._paths.file_access.get_filesystem_for_path(remote).exists(remote):
            self._paths.file_access.get_data(remote, str(to))

    def _patiently(self, read: Callable[[], T]) -> T:
        wait = self._retry_after
        for _ in range(MAX_READ_ATTEMPTS - 1):
            try:
                return read()
            except Exception as error:
                print(f"the previous checkpoint cannot be read yet ({error}); trying again", file=sys.stderr)
                time.sleep(wait)
                wait *= 2
        return read()
