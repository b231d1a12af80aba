"""Keeps copies of the newest shards on the disk of the node that wrote them. Runs in a rank.

A gang that restarts on the same nodes reads the copies instead of storage. Storage replaces missing or damaged copies.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

from flytekitplugins.daskpytorch.process.folders import make_private
from flytekitplugins.daskpytorch.protocol.sharded import Sharding, save_of

OWN_FOLDER = "daskpytorch-shards"
"""Name of the folder with all copies of shards, inside the user's folder `Gang(shard_cache=...)`."""


class ShardCopies:
    """Keeps copies of a rank's shards in the folder `Gang(shard_cache=...)`. Does nothing without this setting."""

    def __init__(self, sharding: Sharding, rank: int) -> None:
        self._nonce = sharding.nonce
        self._before = [start for start in sharding.start if not start.uri.endswith(f"-{self._nonce}")]
        """Checkpoints of earlier drivers. Their copies are removed once this driver commits or gives up a save."""
        self._rank = rank
        self._has_complained = False
        self._cache = sharding.cache
        self._folder = None if sharding.cache is None else Path(sharding.cache, OWN_FOLDER)
        if self._folder is not None:
            try:
                make_private(self._folder)
            except OSError as error:
                self._complain(error)
                self._folder = None

    def write(self, path: str, writes: Iterable[Callable[[IO[bytes]], object]]) -> None:
        """Write a copy of an object that the rank has written to storage.

        Args:
            path: Path or URL of the object in storage.
            writes: Functions that write the pieces of the object's content to a file, in order.
        """
        if self._folder is None:
            return
        copy = self._of(path)
        try:
            make_private(copy.parent)
            with copy.open("wb") as file:
                for write in writes:
                    write(file)
        except Exception as error:  # torch raises RuntimeError on a full disk. Storage has the object in any case.
            with contextlib.suppress(OSError):
                copy.unlink()
            self._complain(error)

    def read(self, path: str, start: int, end: int) -> bytes | None:
        """Return a range of bytes from this node's copy of an object. None: the node has no complete copy.

        Args:
            path: Path or URL of the object in storage.
            start: Offset of the first byte.
            end: Offset after the last byte.
        """
        if self._folder is None:
            return None
        with contextlib.suppress(OSError), self._of(path).open("rb", buffering=0) as file:
            file.seek(start)
            data = file.read(end - start)
            return data if len(data) == end - start else None
        return None

    def prune(self, attempt: int, number: int) -> None:
        """Remove this node's copies of all shards that were saved before save `number` of attempt `attempt`."""
        self._remove_own(lambda save: save < (attempt, number))

    def clear(self) -> None:
        """Remove this node's copies of all shards of the gang, after the gang's last attempt."""
        self._remove_own(lambda _: True)
        if self._folder is not None:
            # A rank that was killed may have left an empty one. Other ranks clear the folder at the same time.
            steps = [each for each in _listed(self._folder) if each.name.startswith("step-")]
            for folder in (*steps, self._folder):
                with contextlib.suppress(OSError):  # another gang's copies are there
                    folder.rmdir()

    def _remove_own(self, is_over: Callable[[tuple[int, int]], bool]) -> None:
        if self._folder is None:
            return
        for folder in (save for step in _listed(self._folder) for save in _listed(step)):
            found = save_of(f"{folder.parent.name}/{folder.name}")
            if found is not None and found[1] == self._nonce and is_over(found[0]):
                _remove(folder)
        for start in self._before:
            if save_of(start.name) is not None:
                _remove(self._folder / start.name)

    def _of(self, path: str) -> Path:
        """Return the path of an object's copy, in folders named as in storage. No other gang uses these names."""
        assert self._folder is not None  # noqa: S101 - all who ask have looked
        return self._folder.joinpath(*path.split("/")[-3:])

    def _complain(self, error: Exception) -> None:
        if not self._has_complained:
            print(
                f"rank {self._rank} cannot keep copies of its shards in Gang(shard_cache={self._cache!r}): {error} "
                "The training goes on; a gang that starts again reads its shards from storage.",
                file=sys.stderr,
            )
        self._has_complained = True


def _listed(folder: Path) -> list[Path]:
    """Return the paths in a folder. Empty if another rank has just removed the folder."""
    with contextlib.suppress(OSError):
        return list(folder.iterdir())
    return []


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # the step has another save
        folder.parent.rmdir()
