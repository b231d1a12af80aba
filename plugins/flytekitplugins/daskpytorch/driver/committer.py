"""Sharded checkpoints, which the ranks write straight to storage: committed here, and here alone. Runs in the driver.

    ranks ──objects──▶ storage
    ranks ──what they wrote──▶ brain ──▶ Committer ──layout.json, .metadata, and at last the manifest──▶ storage

A checkpoint counts once the manifest names it, and is removed only after a manifest does without it.
"""

import contextlib
import functools
import hashlib
import queue
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from flytekitplugins.daskpytorch.context import SavedCheckpoint
from flytekitplugins.daskpytorch.driver.files import Files, unusable
from flytekitplugins.daskpytorch.driver.manifest import Manifest
from flytekitplugins.daskpytorch.driver.retention import retained
from flytekitplugins.daskpytorch.driver.upload import RETRY_AFTER
from flytekitplugins.daskpytorch.process.log import say
from flytekitplugins.daskpytorch.protocol import torch_metadata
from flytekitplugins.daskpytorch.protocol.best import best_first
from flytekitplugins.daskpytorch.protocol.host import StoragePaths
from flytekitplugins.daskpytorch.protocol.sharded import (
    LAYOUT,
    METADATA,
    ShardedCheckpoint,
    Sharding,
    WrittenShards,
    folder_name,
    is_object,
    layout_of,
    save_of,
)
from flytekitplugins.daskpytorch.settings import Gang, Keep

MAX_COMMIT_ATTEMPTS = 10
"""How often a checkpoint is committed before it is given up, which takes some five minutes."""


@dataclass(frozen=True)
class Committed:
    """A sharded checkpoint has been committed, or will not be, for this reason."""

    attempt: int
    number: int
    """Which of the attempt's saves it is."""
    step: int
    error: Exception | None


class Worker:
    """Does one thing after the other, in a thread of its own that starts with the first."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._has_to_hurry, self._is_closed = threading.Event(), threading.Event()

    def submit(self, job: Callable[[], object]) -> None:
        """Do this, too, once all before it is done."""
        self._jobs.put(job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="daskpytorch-shards", daemon=True)
            self._thread.start()

    @property
    def has_begun(self) -> bool:
        """Something was asked of it."""
        return self._thread is not None

    def pause(self, seconds: float, least: float) -> bool:
        """Let time go by, but `least` alone where somebody waits; whether to go on then."""
        self._has_to_hurry.wait(seconds)
        return not self._is_closed.wait(least if self._has_to_hurry.is_set() else 0.0)

    def flush(self, timeout: float) -> bool:
        """Wait until all is done; whether it was in time."""
        self.hurry()
        done = threading.Event()
        self._jobs.put(done.set)
        return self._thread is None or done.wait(timeout)

    def hurry(self) -> None:
        """Have pauses be short from now on."""
        self._has_to_hurry.set()

    def close(self) -> None:
        """Do nothing more."""
        self._is_closed.set()
        self._has_to_hurry.set()
        self._jobs.put(self._is_closed.is_set)

    def _work(self) -> None:
        while not self._is_closed.is_set():
            self._jobs.get()()


@dataclass(frozen=True, kw_only=True)
class ShardStorage:
    """Where a gang's shards go."""

    base: str
    """A path or an fsspec URL, below which each checkpoint has a folder."""
    filesystem: Callable[[str], Any]
    """Gives the file system of such a path or URL."""
    token: Path | None = None
    """A file by which ranks see that they are on this machine; None: `base` is reached from everywhere."""
    is_reused: bool = False
    """Gangs before this one may have left something there."""
    previous: str | None = None
    """The base of the attempt before, where that is another."""

    @functools.cached_property
    def files(self) -> Files:
        """Opened when it is needed: most gangs do without, and a store's client takes its time."""
        return Files(self.filesystem(self.base))

    @classmethod
    def of(
        cls, paths: StoragePaths | None, filesystem: Callable[[str], Any], scratch: Path, *, is_users: bool
    ) -> "ShardStorage":
        """That of a gang whose checkpoints go to these `paths`; `is_users`: to a place that its user has named."""
        base = paths.shards or paths.own if paths is not None else str(scratch / "shards")
        is_reused = paths is not None and paths.own == paths.previous
        previous = (paths.previous_shards or paths.previous) if paths is not None and not is_reused else None
        if "://" in base and not base.startswith("file://"):
            return cls(base=base, filesystem=filesystem, is_reused=is_reused, previous=previous)
        strip = LocalFileSystem._strip_protocol  # noqa: SLF001 - fsspec's own way to a full path
        base, previous = strip(base), strip(previous) if previous is not None else None
        token = Path(base if is_users else scratch, f".driver-{secrets.token_hex(4)}")
        return cls(base=base, filesystem=filesystem, token=token, is_reused=is_reused, previous=previous)


@dataclass
class Committer:
    """Makes checkpoints of what the ranks have written, keeps those that are to stay, and removes what is none."""

    storage: ShardStorage
    manifest: Manifest | None
    """Names the checkpoints, those that it goes on from included; None: no other gang is to find them."""
    say: Callable[[Committed], object]
    """Hears what came of a commit, in the worker's thread."""
    keep: Keep = field(default_factory=Keep)
    worker: Worker = field(default_factory=Worker)
    retry_after: float = RETRY_AFTER
    """Seconds before storage that failed is tried again; doubled each time, up to a minute."""
    cache: str | None = None
    """A folder of each node's for copies of its shards."""
    _nonce: str = field(default_factory=lambda: secrets.token_hex(4))
    _kept: list[ShardedCheckpoint] = field(default_factory=list)
    """In the order in which they were committed."""
    _outdated: set[str] = field(default_factory=set)
    """Folders below the base of checkpoints that are not kept any more."""
    _is_in_doubt: bool = False
    """Nobody knows which manifest storage has: it has not answered."""
    _has_complained: bool = False

    @classmethod
    def of(
        cls,
        settings: Gang,
        paths: StoragePaths | None,
        manifest: Manifest | None,
        scratch: Path,
        filesystem: Callable[[str], Any],
        say: Callable[[Committed], object],
    ) -> "Committer":
        """That of a gang with these settings, whose other checkpoints go to these paths."""
        place = ShardStorage.of(paths, filesystem, scratch, is_users=settings.checkpoint_uri is not None)
        return cls(place, manifest, say, settings.keep, cache=settings.shard_cache)

    def begin(self) -> None:
        """Go on from the checkpoints that the manifest has by now.

        Raises:
            OSError: The user has named a folder that cannot be written.
        """
        self._kept = list(reversed(self.manifest.sharded)) if self.manifest is not None else []
        self._leave_token()
        if self._kept and not self.storage.is_reused:
            self.worker.submit(self._carry_forward)
        if self.manifest is not None and self.manifest.is_known:
            if self.storage.is_reused:
                self.worker.submit(lambda: self._remove(lambda _, nonce: nonce != self._nonce))
            if (previous := self.storage.previous) is not None:
                inherited = list(self._kept)
                self.worker.submit(lambda: self._remove_others(previous, inherited))

    def sharding(self) -> Sharding:
        """What the ranks of an attempt that starts now are told."""
        token = str(self.storage.token) if self.storage.token is not None else None
        start = tuple(reversed(self._kept))
        return Sharding(base=self.storage.base, nonce=self._nonce, token=token, start=start, cache=self.cache)

    def newest(self) -> ShardedCheckpoint | None:
        """The newest that is committed."""
        kept = self._kept
        return kept[-1] if kept else None

    def saved(self) -> tuple[SavedCheckpoint, ...]:
        """What a user is told of those that are kept."""
        return tuple(entry.saved for entry in self._kept)

    def find(self, step: int | None) -> ShardedCheckpoint | None:
        """The newest of this step or, with None, the best; None: there is none."""
        kept = self._kept
        found = best_first(kept, self.keep) if step is None else [entry for entry in kept[::-1] if entry.step == step]
        return found[0] if found else None

    def commit(self, written: Sequence[WrittenShards]) -> None:
        """Make a checkpoint of what all the ranks of an attempt have written, in their order."""
        self.worker.submit(lambda: self._commit(written))

    def sweep(self, attempt: int, number: int = -1) -> None:
        """Remove what is in no checkpoint, of this attempt's saves up to this one, and of all attempts before."""
        self.worker.submit(lambda: self._remove(lambda save, nonce: nonce == self._nonce and save <= (attempt, number)))

    def hurry(self) -> None:
        """Somebody waits for what is being committed."""
        self.worker.hurry()

    def flush(self, timeout: float) -> bool:
        """Wait until all is committed, and what no rank writes any more removed; whether it was in time."""
        if self.worker.has_begun:
            self.sweep(sys.maxsize)
        return self.worker.flush(timeout)

    def close(self) -> None:
        """Commit nothing more."""
        self.worker.close()
        if self.storage.token is not None:
            with contextlib.suppress(OSError):
                self.storage.token.unlink()

    def _leave_token(self) -> None:
        token = self.storage.token
        if token is None:
            return
        try:
            token.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            token.touch(mode=0o600)
        except OSError as error:
            raise unusable("Gang(checkpoint_uri=...)", str(token.parent), error) from error

    # ---- in the worker's thread

    def _carry_forward(self) -> None:
        """Name what the attempt before has left in a manifest of our own, so that it is found after this one."""
        self._patiently(lambda: self._name(self._kept), "sharded checkpoints of the attempt before", "named")

    def _commit(self, written: Sequence[WrittenShards]) -> None:
        of = written[0]
        error = self._patiently(
            lambda: self._make_checkpoint(written), f"sharded checkpoint of step {of.step}", "committed"
        )
        self.say(Committed(of.attempt, of.number, of.step, error))

    def _patiently(self, work: Callable[[], None], what: str, done: str) -> Exception | None:
        """Do this until storage lets it be done; the error if it never does."""
        wait = self.retry_after
        for number in range(1, MAX_COMMIT_ATTEMPTS + 1):
            try:
                work()
            except Exception as error:  # whatever a store's client raises: the training goes on without it
                failure = error
            else:
                return None
            if number == 1:
                say(
                    f"the {what} could not be {done} ({type(failure).__name__}: {failure}); "
                    "trying again for some minutes. The training goes on.",
                )
            if not self.worker.pause(wait, self.retry_after):
                break
            wait = min(60.0, 2 * wait)
        return failure

    def _make_checkpoint(self, written: Sequence[WrittenShards]) -> None:
        first, files = written[0], self.storage.files
        uri = f"{self.storage.base}/{folder_name(first.attempt, self._nonce, first.step, first.number)}"
        layout = layout_of(written)
        files.write(f"{uri}/{LAYOUT}", layout)
        if (metadata := _metadata_of(layout)) is not None:
            files.write(f"{uri}/{METADATA}", metadata)
        made = ShardedCheckpoint(
            attempt=first.attempt,
            step=first.step,
            world_size=len(written),
            uri=uri,
            size=sum(part.size for each in written for part in each.parts),
            layout_digest=hashlib.sha256(layout).hexdigest(),
            metrics=first.metrics,
        )
        self._name(retained([*(entry for entry in self._kept if entry.uri != uri), made], self.keep))

    def _name(self, entries: list[ShardedCheckpoint]) -> None:
        if self.manifest is not None:
            self._is_in_doubt = True
            self.manifest.write(sharded=entries[::-1])
            self._is_in_doubt = False
        self._outdated |= self._named_below(self._kept) - self._named_below(entries)
        self._kept = entries

    def _named_below(self, entries: Sequence[ShardedCheckpoint]) -> set[str]:
        """The folders of checkpoints, as they are called below our own base; others are another attempt's."""
        return {entry.uri.removeprefix(f"{self.storage.base}/") for entry in entries}

    def _remove(self, is_over: Callable[[tuple[int, int], str], bool]) -> None:
        """Remove what no manifest names, where this says so of an attempt, its save and their nonce."""
        if self._is_in_doubt:  # a manifest may name what seems to be in none; another time
            return
        named = self._named_below(self._kept)
        try:
            for folder, save, nonce in self._folders(self.storage.base):
                if folder not in named and (is_over(save, nonce) or folder in self._outdated):
                    self.storage.files.remove(f"{self.storage.base}/{folder}", is_object)
            self._outdated.clear()
        except Exception as error:  # whatever a store's client raises: nothing needs it to be gone
            if not self._has_complained:
                say(
                    f"shards that nobody needs any more cannot be removed from {self.storage.base} and stay there "
                    f"({type(error).__name__}: {error}); allow it, or have the storage expire them. Checkpoints are "
                    "kept all the same.",
                )
            self._has_complained = True

    def _remove_others(self, base: str, inherited: Sequence[ShardedCheckpoint]) -> None:
        """Remove what the attempt before was writing when it ended: all there that its manifest does not name."""
        named = {entry.uri for entry in inherited}
        with contextlib.suppress(Exception):  # nothing needs it to be gone
            for folder, _, _ in self._folders(base):
                if f"{base}/{folder}" not in named:
                    self.storage.files.remove(f"{base}/{folder}", is_object)

    def _folders(self, base: str) -> Iterator[tuple[str, tuple[int, int], str]]:
        """All below a base that belong to saves: of which attempt, which of its saves, and by whose nonce."""
        files = self.storage.files
        for step in files.folders(base):
            for save in files.folders(f"{base}/{step}"):
                if (found := save_of(folder := f"{step}/{save}")) is not None:
                    yield folder, *found


def _metadata_of(layout: bytes) -> bytes | None:
    try:
        return torch_metadata.metadata_of(layout)
    except Exception as error:  # whatever another torch raises: a gang reads the layout
        say(
            f"the checkpoint can be read by gangs only, not by plain torch: {type(error).__name__}: {error}",
        )
        return None
