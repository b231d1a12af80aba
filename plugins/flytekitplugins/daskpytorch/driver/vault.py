"""A gang's checkpoints: on the driver's disk, in storage, and in the manifest that names them. Runs in the driver.

    whole      rank 0 ──file──▶ driver's disk ──copy──▶ storage ──▶ manifest
    sharded    all ranks ──objects──▶ storage ──▶ manifest

The driver's disk keeps whole checkpoints where lost workers cannot harm them. Storage keeps checkpoints for the task's
next attempt or the next call. This gang uses a checkpoint once rank 0 has reported it. Another gang does once the
manifest, one small object, names it: new files are written first, then the manifest, and old files are removed last.

A new attempt first writes a manifest that names the previous attempt's checkpoints in their old folders: so they
survive attempts that die before their first checkpoint. Then the newest and the best whole ones are copied to the new
folder.
"""

import shutil
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flytekitplugins.daskpytorch.driver import manifest
from flytekitplugins.daskpytorch.driver.manifest import best_first, retained
from flytekitplugins.daskpytorch.driver.storage import Shards
from flytekitplugins.daskpytorch.errors import GangStartError
from flytekitplugins.daskpytorch.process.folders import state_of
from flytekitplugins.daskpytorch.process.streams import say
from flytekitplugins.daskpytorch.process.worker import Worker
from flytekitplugins.daskpytorch.protocol.checkpoints import LENT, OBJECT, CheckpointEntry, digest_of, take_file
from flytekitplugins.daskpytorch.protocol.files import link_or_copy
from flytekitplugins.daskpytorch.protocol.framing import Connection
from flytekitplugins.daskpytorch.protocol.host import StoragePaths, open_filesystem
from flytekitplugins.daskpytorch.records import SavedCheckpoint
from flytekitplugins.daskpytorch.settings import Gang


@dataclass(eq=False)
class Record:
    """A checkpoint: a whole one on the driver's disk, in storage, or both. A sharded one in storage."""

    entry: CheckpointEntry
    """Its folder is None if storage has no copy."""
    state: tuple[int, ...] | None = None
    """Device, inode, size and modification time of the driver's file when its digest was right: while these stay, the
    digest need not be computed again. None: not on the driver's disk."""


class Vault:
    """Keeps a gang's checkpoints. Training never waits for storage."""

    def __init__(
        self,
        settings: Gang,
        paths: StoragePaths | None,
        disk: Path,
        filesystem: Callable[[str], Any] = open_filesystem,
        worker: Worker | None = None,
    ) -> None:
        """`disk` is removed with the driver's end. It holds the sharded checkpoints, too, if `paths` is None."""
        self._paths = paths
        self.own = paths.files.path(paths.own) if paths is not None else None
        self.is_users_folder = self.own is not None and "://" not in self.own
        """True if storage is a folder of this machine, where the user finds the checkpoints after the gang."""
        self.keep = settings.keep
        self._held: frozenset[str] = frozenset()
        self._disk = disk
        self.lent = disk / LENT
        self.worker = worker or Worker()
        self._lock = threading.RLock()
        self._attempt = 0
        self._records: dict[str, Record] = {}
        """By name, in the order of arrival in the driver. Storage's manifest names no other checkpoints."""
        self._copying: str | None = None
        self._has_saved_shards = False
        self._written = manifest.content_of([])
        """The newest manifest whose write has succeeded. Storage may hold one whose answer was lost."""
        self._leftovers: list[CheckpointEntry] = []
        """Checkpoints to remove from storage: damaged ones, and those no longer in the manifest."""
        self._is_known = False
        """The previous attempt's manifest has been read: the older checkpoints to keep are known."""
        self.shards = Shards(settings, paths, disk, filesystem, self.worker, lambda: self._records)

    # ---- the previous attempt

    def restore(self) -> CheckpointEntry | None:
        """Copy the previous attempt's newest undamaged whole checkpoint and its best ones to the driver's disk.

        The next manifest repeats the previous one's undamaged checkpoints. Returns the newest whole checkpoint, from
        which the gang starts, or None.
        """
        if self._paths is None or self._paths.previous is None:
            return None
        files = self._paths.files
        folder, retry_after = files.path(self._paths.previous), self.worker.retry_after
        listed, damaged = manifest.restore(files, folder, self.keep, self._disk, retry_after)
        self._is_known = listed is not None
        with self._lock:
            for entry in reversed(listed or ()):
                if entry not in damaged:
                    self._records[entry.name] = Record(entry, state_of(self.path_of(entry)))
            self._leftovers += [entry for entry in damaged if entry.folder == self.own]
            self._go_on()
        return self.newest()

    def adopt(self, start: CheckpointEntry) -> None:
        """Let the gang start from this checkpoint.

        Raises `OSError` if a whole one's file is gone, or the disk is full.
        """
        if start.is_sharded:
            self._records[start.name] = Record(start)
            return
        link_or_copy(Path(start.uri), self.path_of(start))
        self.add(replace(start, folder=None))

    def begin(self) -> None:
        """Show ranks the folder of shards, and remove old uncommitted ones. Call after `restore`.

        Raises `OSError` if the folder that the user has named cannot be written.
        """
        self.shards.begin(follows=self._is_known)

    # ---- what ranks have written

    def fence(self, attempt: int) -> None:
        """Refuse uploads of attempts before this one, and queue the removal of their uncommitted shards."""
        self._attempt = attempt
        self.shards.sweep(attempt, -1)

    def receive(self, connection: Connection, file: CheckpointEntry) -> str | None:
        """Receive a file that rank 0 uploads, in a thread of the driver's listener. Return the reason of a refusal."""
        what, refusal = f"the checkpoint of step {file.step}", None
        pieces = connection.pieces(file.size, what)
        try:
            if file.attempt < self._attempt:
                refusal = f"a checkpoint of attempt {file.attempt} came when attempt {self._attempt} was running"
            else:
                take_file(pieces, self.path_of(file), what, file.digest)
        except (OSError, ValueError) as error:
            refusal = f"{type(error).__name__}: {error}"
        for _ in pieces:  # else the rank, which still sends, would get a reset in place of the reason
            pass
        return refusal

    def add(self, entry: CheckpointEntry) -> None:
        """Keep a checkpoint that rank 0 has reported, and queue its copy to storage and the manifest.

        Raises `OSError` if a whole one is not on the driver's disk.
        """
        path = self.path_of(entry)
        state = None if entry.is_sharded else state_of(path)
        if state is None and not entry.is_sharded:
            raise FileNotFoundError(f"{path} is gone")
        with self._lock:
            self._has_saved_shards |= entry.is_sharded
            before = self._records.pop(entry.name, None)
            if before is not None:  # saved again, perhaps without metrics
                known = before.entry
                metrics = {**known.metrics, **entry.metrics}
                entry = replace(entry, metrics=metrics, is_evaluated=known.is_evaluated, folder=known.folder)
            self._records[entry.name] = Record(entry, state)
            self._tidy()

    # ---- what is kept

    def hold(self, names: Collection[str]) -> None:
        """Keep checkpoints with these names, too, instead of those held before."""
        with self._lock:
            self._held = frozenset(names)
            self._tidy()

    def note_evaluated(self, name: str, metrics: Mapping[str, float]) -> None:
        with self._lock:
            if (record := self._records.get(name)) is not None:
                metrics = {**record.entry.metrics, **metrics}
                record.entry = replace(record.entry, metrics=metrics, is_evaluated=True)
            self._tidy()

    def path_of(self, file: CheckpointEntry) -> Path:
        return self._disk / file.name

    def lend(self, file: CheckpointEntry | None) -> None:
        """Give a file a second name, by which ranks load it, whatever the policy removes meanwhile."""
        if file is not None and not (lent := self.lent / file.name).exists():
            self.lent.mkdir(exist_ok=True)
            link_or_copy(self.path_of(file), lent)

    def take_back(self) -> None:
        shutil.rmtree(self.lent, ignore_errors=True)

    def newest(self) -> CheckpointEntry | None:
        """Return the newest whole checkpoint."""
        return next(reversed(self.intact()), None)

    def entries(self) -> list[CheckpointEntry]:
        """Return the whole checkpoints on the driver's disk, in the order of arrival."""
        with self._lock:
            return [record.entry for record in self._here()]

    @property
    def sharded(self) -> list[CheckpointEntry]:
        with self._lock:
            entries = [record.entry for record in self._records.values() if record.entry.is_sharded]
        # Restored ones stay until the first save: the newest may be damaged, so that ranks load an older one.
        return self._retained(entries) if self._has_saved_shards else entries

    def saved(self) -> tuple[SavedCheckpoint, ...]:
        kept = [entry.saved(self.own) for entry in (*self.entries(), *self.sharded)]
        return tuple(sorted(kept, key=lambda saved: saved.step))

    def intact(self) -> list[CheckpointEntry]:
        """Return the whole checkpoints on the driver's disk, in the order of arrival, and remove damaged ones."""
        with self._lock:
            for record in self._here():
                path = self.path_of(record.entry)
                found = state_of(path)
                if found is None or (found != record.state and digest_of(path) != record.entry.digest):
                    say(
                        f"the checkpoint of step {record.entry.step} is damaged; the gang uses the one before. Its "
                        f"file {path} is gone or was changed, as by a program that cleans up"
                    )
                    self._drop(record)
            return self.entries()

    def choose(self, step: int | None, *, is_sharded: bool) -> CheckpointEntry | None:
        """Return the newest checkpoint of a step, or the best if `step` is None, and lend a whole one."""
        found = manifest.find(self.sharded if is_sharded else self.intact(), self.keep, step)
        if not is_sharded:
            self.lend(found)
        return found

    def _here(self) -> list[Record]:
        return [record for record in self._records.values() if record.state is not None]

    def _retained(self, entries: list[CheckpointEntry]) -> list[CheckpointEntry]:
        return retained(entries, self.keep, lambda entry: entry.name in self._held)

    def _tidy(self) -> None:
        stay = self._retained(self.entries())
        for record in self._here():
            if record.entry not in stay:
                self._drop(record)
        self._go_on()

    def _drop(self, record: Record) -> None:
        self.path_of(record.entry).unlink(missing_ok=True)
        record.state = None
        self._forget_lost()

    def _forget_lost(self) -> None:
        self._records = {
            name: record
            for name, record in self._records.items()
            if record.state is not None or record.entry.folder is not None or name == self._copying
        }

    # ---- to storage

    def flush(self, timeout: float) -> bool:
        """Wait for all writes to storage. Return True if its manifest names the newest checkpoint, if any."""
        self.worker.flush(timeout)
        with self._lock:
            newest = next(reversed(self._records.values()), None)
            return newest is None or (newest.entry.folder is not None and not self._has_news())

    def finish(self, timeout: float) -> None:
        """Remove all uncommitted shards, and wait for all writes to storage. Call after the ranks' end."""
        if self.worker.has_begun:
            self.shards.sweep(sys.maxsize, 0)
        self.flush(timeout)

    def close(self) -> None:
        self.worker.close()
        self.shards.hide()

    def _go_on(self) -> None:
        if self._has_news() or self._next() is not None:
            self.worker.submit(self._work, self._tell_failure)

    def _next(self) -> Record | None:
        """The best go first: otherwise frequent saves would keep them out of storage."""
        if self._paths is None:
            return None
        newest = [*self._here()][-1:]
        best = best_first(self.entries(), self.keep)[: self.keep.best]
        wanted = newest + [record for file in best if (record := self._records[file.name]) not in newest]
        waiting = [record for record in wanted if record.entry.folder != self.own]
        return waiting[0 if self.worker.is_urgent else -1] if waiting else None

    def _listed(self) -> list[CheckpointEntry]:
        """Return the manifest's checkpoints, the newest first."""
        stored = [record.entry for record in self._records.values() if record.entry.folder is not None]
        names = {entry.name for entry in (*self._retained([e for e in stored if not e.is_sharded]), *self.sharded)}
        return [entry for entry in reversed(stored) if entry.name in names]

    def _content(self, listed: list[CheckpointEntry]) -> bytes:
        return manifest.content_of([replace(e, folder=None if e.folder == self.own else e.folder) for e in listed])

    def _has_news(self) -> bool:
        return self._content(self._listed()) != self._written

    # ---- in the worker's thread

    def _work(self) -> None:
        with self._lock:
            has_news, record = self._has_news(), self._next()
            self._copying = None if has_news or record is None else record.entry.name
        if has_news:
            self._write_manifest()
        elif self._copying is not None and self._paths is not None:
            self._copy(self._paths, self._copying)
        with self._lock:
            self._copying = None
            self._forget_lost()
            self._go_on()

    def _copy(self, paths: StoragePaths, name: str) -> None:
        source = self._disk / name
        try:
            paths.prepare()
            paths.files.put(source, f"{self.own}/{name}")
        except Exception:
            with self._lock:  # the file may have been removed, for example for a newer checkpoint
                if source.exists():
                    raise
                self._records[name].state = None
            return
        with self._lock:
            record = self._records[name]
            record.entry = replace(record.entry, folder=self.own)

    def _write_manifest(self) -> None:
        with self._lock:
            listed = self._listed()
            names = {entry.name for entry in listed}
            stored = [record for record in self._records.values() if record.entry.folder is not None]
        content = self._content(listed)
        if self._paths is not None:
            self._paths.prepare()
            self._paths.files.write(f"{self.own}/{manifest.MANIFEST}", content)
        with self._lock:
            self._written = content
            for record in stored:
                entry = record.entry
                if entry.name not in names and self._records.get(entry.name) is record:  # else it was saved again
                    # Files of an earlier attempt stay: that attempt's own manifest names them.
                    if entry.folder in (self.own, self.shards.base):
                        self._leftovers.append(entry)
                    record.entry = replace(entry, folder=None)
            self._forget_lost()
        while self._leftovers:
            entry = self._leftovers.pop()
            with self.shards.removing(str(entry.folder)):
                if entry.is_sharded:
                    self.shards.files.remove(entry.uri, OBJECT.fullmatch)
                elif self._paths is not None:
                    self._paths.files.fs.rm_file(entry.uri)

    def _tell_failure(self, error: Exception, num_failures: int, _: float) -> bool:
        if isinstance(error, GangStartError):  # a newer gang has taken over the folder, and this gang ends
            return True
        if num_failures == 1:
            reason = f"({type(error).__name__}: {error}); trying again until they can. The training goes on."
            say(f"checkpoints could not be copied to {self.own} {reason}")
        return False
