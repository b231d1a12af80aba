"""A gang's checkpoints: whole ones on the driver's disk and in storage, and the manifest of both kinds.

Runs in the driver, whose disk keeps whole checkpoints where lost workers cannot harm them. Storage keeps copies for the
task's next attempt or the next call. A checkpoint in storage counts once the manifest, one small object, names it: new
files are written first, then the manifest, and old files are removed last. Whole checkpoints are files beside the
manifest, or in their entry's `folder`. Sharded checkpoints are folders.

A new attempt first writes a manifest that names the previous attempt's checkpoints in their old folders: so they
survive attempts that die before their first checkpoint. Then the newest and the best whole ones are copied to the new
folder.
"""

import contextlib
import functools
import shutil
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from flytekitplugins.daskpytorch.driver import manifest
from flytekitplugins.daskpytorch.driver.manifest import Whole, best_first, retained
from flytekitplugins.daskpytorch.errors import GangStartError
from flytekitplugins.daskpytorch.process.folders import state_of
from flytekitplugins.daskpytorch.process.streams import say
from flytekitplugins.daskpytorch.process.worker import Worker
from flytekitplugins.daskpytorch.protocol.checkpoints import LENT, CheckpointEntry, take_file
from flytekitplugins.daskpytorch.protocol.files import link_or_copy
from flytekitplugins.daskpytorch.protocol.framing import Connection
from flytekitplugins.daskpytorch.protocol.host import StoragePaths
from flytekitplugins.daskpytorch.records import SavedCheckpoint
from flytekitplugins.daskpytorch.settings import Keep

LANE = "files"


class Vault:
    """Keeps whole checkpoints on the driver's disk and in storage. Training never waits for storage."""

    def __init__(self, paths: StoragePaths | None, keep: Keep, disk: Path, worker: Worker | None = None) -> None:
        self._paths = paths
        self.own = paths.own if paths is not None else None
        self.is_users_folder = self.own is not None and "://" not in self.own
        """True if storage is a folder of this machine, where the user finds the checkpoints after the gang."""
        self.keep = keep
        self._held: frozenset[str] = frozenset()
        self._disk = disk
        self.lent = disk / LENT
        self.worker = worker or Worker()
        self._lock = threading.RLock()
        self._attempt = 0
        self._whole: dict[str, Whole] = {}
        """By file name, in the order of arrival in the driver."""
        self._copying: str | None = None
        self._is_turn_of_best = False
        self._is_at_work = False
        """A job of this vault waits or runs in `worker`, which gets one at a time."""
        self.sharded: list[CheckpointEntry] = []
        self._has_committed = False
        self._written = manifest.content_of([])
        self._stored: frozenset[str] = frozenset()
        self._leftovers: set[str] = set()
        """Files to remove from this attempt's folder: damaged ones, and those no longer in the manifest."""
        self.is_known = False
        """The previous attempt's manifest has been read: the older checkpoints to keep are known."""
        self.is_in_doubt = False
        """A manifest's write has begun and not succeeded: storage may hold the old one or the new one."""
        self._has_complained = False

    # ---- the previous attempt

    def restore(self) -> CheckpointEntry | None:
        """Copy the previous attempt's newest undamaged whole checkpoint and its best ones to the driver's disk.

        The next manifest repeats the previous one's sharded checkpoints and, if a whole one was copied, its undamaged
        whole ones. Returns the newest whole checkpoint, from which the gang starts, or None.
        """
        if self._paths is None or self._paths.previous is None:
            return None
        read = manifest.restore(self._paths.files, self._paths.previous, self.keep, self._disk, self.worker.retry_after)
        self.sharded, self.is_known, found = read.sharded, read.is_known, read.found
        with self._lock:
            for file in reversed(read.listed if found else []):
                if file.name not in read.damaged:
                    state = state_of(self._disk / file.name) if file in found else None
                    self._whole[file.name] = Whole(file, state, file.folder)
                elif file.folder == self.own:
                    self._leftovers.add(file.name)
            self._go_on()
        return found[0] if found else None

    def adopt(self, start: CheckpointEntry) -> None:
        """Let the gang start from this checkpoint.

        Raises `OSError` if a whole one's file is gone, or the disk is full.
        """
        if start.is_sharded:
            self.sharded = [start]
            return
        link_or_copy(Path(start.uri), self._disk / start.name)
        self.add(replace(start, attempt=self._attempt, folder=None))

    # ---- on the driver's disk

    def fence(self, attempt: int) -> None:
        """Refuse whole checkpoints of attempts before this one."""
        with self._lock:
            self._attempt = attempt

    def receive(self, connection: Connection, file: CheckpointEntry) -> str | None:
        """Receive a file that rank 0 uploads, in a thread of the driver's listener. Return the reason of a refusal."""
        what = f"the checkpoint of step {file.step}"
        pieces = connection.pieces(file.size, what)
        try:
            if (refusal := _refusal(file, self._attempt)) is None:
                take_file(pieces, self.path_of(file), what, file.digest)
        except (OSError, ValueError) as error:
            refusal = f"{type(error).__name__}: {error}"
        for _ in pieces:  # else the rank, which still sends, would get a reset in place of the reason
            pass
        return refusal

    def lend(self, file: CheckpointEntry | None) -> None:
        """Give a file a second name, by which ranks load it, whatever the policy removes meanwhile."""
        if file is not None and not (lent := self.lent / file.name).exists():
            self.lent.mkdir(exist_ok=True)
            link_or_copy(self.path_of(file), lent)

    def take_back(self) -> None:
        shutil.rmtree(self.lent, ignore_errors=True)

    def add(self, file: CheckpointEntry) -> None:
        """Keep a whole checkpoint that is on the driver's disk, and queue a copy to storage.

        Raises `OSError` if the file is missing, `ValueError` if it was cut short or is an earlier attempt's. Such a
        file is then removed, unless a kept checkpoint has its name.
        """
        path = self._disk / file.name
        with self._lock:
            refusal = _refusal(file, self._attempt)
            if refusal is None and (size := path.stat().st_size) != file.size:
                refusal = (
                    f"the checkpoint of step {file.step} has {size:,} bytes, not {file.size:,}: its file was cut short"
                )
            if refusal is not None:
                if file.name not in {kept.name for kept in self.entries()}:
                    path.unlink(missing_ok=True)
                raise ValueError(refusal)
            before = self._whole.pop(file.name, None)
            if before is not None:  # saved again, perhaps without metrics
                metrics = {**before.file.metrics, **file.metrics}
                file = replace(file, metrics=metrics, is_evaluated=before.file.is_evaluated)
            self._whole[file.name] = Whole(file, state_of(path), before.folder if before is not None else None)
            self._tidy()

    def hold(self, names: Collection[str]) -> None:
        """Keep checkpoints with these names, too, instead of those held before."""
        with self._lock:
            self._held = frozenset(names)
            self._tidy()

    def note_evaluated(self, name: str, metrics: Mapping[str, float]) -> None:
        with self._lock:
            for whole in self._whole.values():
                whole.file = manifest.evaluated(whole.file, name, metrics)
            self.sharded = [manifest.evaluated(entry, name, metrics) for entry in self.sharded]
            self._tidy()

    def path_of(self, file: CheckpointEntry) -> Path:
        return self._disk / file.name

    def _tidy(self) -> None:
        stay = self._retained(self.entries())
        for whole in self._here():
            if whole.file not in stay:
                self._drop(whole)
        if self._paths is None:
            self.sharded = self._staying()
        self._go_on()

    def newest(self) -> CheckpointEntry | None:
        return next(reversed(self.intact()), None)

    def entries(self) -> list[CheckpointEntry]:
        with self._lock:
            return [whole.file for whole in self._here()]

    def saved(self) -> tuple[SavedCheckpoint, ...]:
        kept = [entry.saved(self.own) for entry in (*self.entries(), *self.sharded)]
        return tuple(sorted(kept, key=lambda saved: saved.step))

    def intact(self) -> list[CheckpointEntry]:
        """Return the whole checkpoints on the driver's disk, in the order of arrival, and remove damaged ones."""
        with self._lock:
            for whole in self._here():
                if not whole.is_intact_at(self._disk / whole.file.name):
                    say(
                        f"the checkpoint of step {whole.file.step} is damaged; the gang uses the one before. Its file "
                        f"{self._disk / whole.file.name} is gone or was changed, as by a program that cleans up"
                    )
                    self._drop(whole)
            return self.entries()

    def _here(self) -> list[Whole]:
        return [whole for whole in self._whole.values() if whole.state is not None]

    def _drop(self, whole: Whole) -> None:
        (self._disk / whole.file.name).unlink(missing_ok=True)
        whole.state = None
        self._forget_lost()

    def _forget_lost(self) -> None:
        self._whole = {
            name: whole
            for name, whole in self._whole.items()
            if whole.state is not None or whole.folder is not None or name == self._copying
        }

    # ---- to storage

    def flush(self, timeout: float) -> bool:
        """Wait for all copies to storage.

        Return True if the newest whole checkpoint, if any, is in storage's manifest.
        """
        self.worker.flush(timeout, lane=LANE)
        with self._lock:
            newest = next(reversed(self._whole), None)
            return newest is None or newest in self._stored

    def name(self, *made: CheckpointEntry) -> None:
        """Apply the retention policy to the sharded checkpoints, and write a changed manifest.

        `made` are new in storage.
        """
        with self._lock:
            has_news = bool(made) or self._has_news()
            self.sharded = self._staying(made) if self._paths is None else self.sharded
        if self._paths is not None and has_news:
            self._write_manifest(self._paths, made)
        self._has_committed |= bool(made)

    def _go_on(self) -> None:
        if self._paths is not None and not self._is_at_work and (self._has_news() or self._next() is not None):
            self.worker.submit(functools.partial(self._work, self._paths), self._tell_failure, lane=LANE)
            self._is_at_work = True  # not if the worker's thread cannot start: the next checkpoint tries again

    def _next(self) -> Whole | None:
        """The newest and the best take turns: otherwise frequent saves would keep the best out of storage."""
        newest = [*self._whole.values()][-1:]
        best = best_first([whole.file for whole in self._whole.values()], self.keep)[: self.keep.best]
        wanted = newest + [whole for file in best if (whole := self._whole[file.name]) not in newest]
        waiting = [whole for whole in wanted if whole.state is not None and whole.folder != self.own]
        if len(waiting) > 1 and self._is_turn_of_best and not self.worker.is_urgent:
            return waiting[1]
        return waiting[0] if waiting else None

    def _listed(self) -> list[CheckpointEntry]:
        stored = [whole.file for whole in self._whole.values() if whole.folder is not None]
        listed = [(file, self._whole[file.name].folder) for file in reversed(self._retained(stored))]
        return [replace(file, folder=None if folder == self.own else folder) for file, folder in listed]

    def _staying(self, made: Sequence[CheckpointEntry] = ()) -> list[CheckpointEntry]:
        # Restored ones stay until the first commit: the newest may be damaged, so that ranks load an older one.
        return self._retained([*self.sharded, *made]) if made or self._has_committed else self.sharded

    def _retained(self, entries: Sequence[CheckpointEntry]) -> list[CheckpointEntry]:
        return retained(entries, self.keep, lambda entry: entry.name in self._held)

    def _has_news(self) -> bool:
        return manifest.content_of([*self._listed(), *reversed(self._staying())]) != self._written

    # ---- in the worker's thread

    def _work(self, paths: StoragePaths) -> None:
        with self._lock:
            has_news, whole = self._has_news(), self._next()
            self._copying = None if has_news or whole is None else whole.file.name
            if self._copying is not None:
                self._is_turn_of_best = not self._is_turn_of_best
        if has_news:
            self._write_manifest(paths)
        elif self._copying is not None:
            self._copy(paths, self._copying)
        with self._lock:
            self._is_at_work, self._copying = False, None
            self._forget_lost()
            self._go_on()

    def _copy(self, paths: StoragePaths, name: str) -> None:
        source = self._disk / name
        try:
            paths.prepare()
            paths.files.put(source, f"{paths.own}/{name}")
        except Exception:
            with self._lock:  # the file may have been removed, for example for a newer checkpoint
                if source.exists():
                    raise
                self._whole[name].state = None
            return
        with self._lock:
            self._whole[name].folder = paths.own

    def _write_manifest(self, paths: StoragePaths, made: Sequence[CheckpointEntry] = ()) -> None:
        with self._lock:
            listed, sharded = self._listed(), self._staying(made)
            names = frozenset(file.name for file in listed)
            dropped = [whole for name, whole in self._whole.items() if whole.folder is not None and name not in names]
        content = manifest.content_of([*listed, *reversed(sharded)])
        paths.prepare()
        self.is_in_doubt = True
        paths.files.write(f"{paths.own}/{manifest.MANIFEST}", content)
        self.is_in_doubt = False
        with self._lock:
            self._written, self._stored = content, names
            named = {entry.name for entry in sharded}
            # An evaluation may have ended during the write.
            self.sharded = [entry for entry in (*self.sharded, *made) if entry.name in named]
            for whole in dropped:
                if self._whole.get(whole.file.name) is whole:  # else the checkpoint was saved again
                    if whole.folder == paths.own:  # an earlier attempt's manifest still names its own files
                        self._leftovers.add(whole.file.name)
                    whole.folder = None
            self._forget_lost()
        while self._leftovers:
            with self.removing(paths.own):
                paths.files.fs.rm_file(f"{paths.own}/{self._leftovers.pop()}")

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

    def _tell_failure(self, error: Exception, _: int, pause: float) -> bool:
        if isinstance(error, GangStartError):  # a newer gang has taken over the folder, and this gang ends
            return True
        failed = "list of checkpoints could not be written"
        with self._lock:
            if self._copying is not None:
                failed = f"checkpoint of step {self._whole[self._copying].file.step} could not be copied"
        reason = f"({type(error).__name__}: {error}); trying again in {pause:g} s. The training goes on."
        say(f"the {failed} to {self.own} {reason}")
        return False


def _refusal(file: CheckpointEntry, attempt: int) -> str | None:
    if file.attempt >= attempt:
        return None
    return f"a checkpoint of attempt {file.attempt} came when attempt {attempt} was running"
