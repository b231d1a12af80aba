"""Keeps a gang's whole checkpoints on the driver's disk, where lost workers cannot harm them. Runs in the driver.

Only the driver uploads whole checkpoints. The driver fetches files whole or not at all, refuses files of older
attempts, and keeps the last few and the best. `Vault` uploads them to storage, so that the task's next attempt starts
from the newest.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from flytekitplugins.daskpytorch.context import SavedCheckpoint
from flytekitplugins.daskpytorch.driver.agents import Peer
from flytekitplugins.daskpytorch.driver.retention import find, retained
from flytekitplugins.daskpytorch.driver.vault import Vault
from flytekitplugins.daskpytorch.process.log import say
from flytekitplugins.daskpytorch.protocol.checkpoint_file import CheckpointFile, digest_of, take_file
from flytekitplugins.daskpytorch.protocol.framing import Connection
from flytekitplugins.daskpytorch.protocol.messages import Download, Fetch, Upload
from flytekitplugins.daskpytorch.settings import Keep

MAX_RETRIES = 2
"""Maximum number of retries of a checkpoint's fetch whose connection broke."""


class Checkpoints:
    """Keeps the newest and the best checkpoints of one gang, as its `Keep` settings ask."""

    def __init__(self, folder: Path, vault: Vault) -> None:
        self._folder = folder
        self._vault = vault
        self._keep = vault.keep
        self._lock = threading.Lock()
        self._kept: list[CheckpointFile] = []
        self._states: dict[str, tuple[int, ...]] = {}
        """Inode, size and modification time of each file when its digest was right, by name. Unless these change, the
        digest is still right."""
        self._attempt = 0

    def restore(self) -> CheckpointFile | None:
        """Download the previous attempt's newest and best checkpoints from storage.

        Returns:
            The newest checkpoint, from which the gang starts, or None.
        """
        found = self._vault.restore(self._folder)
        for file in found:
            self._keep_here(file)
        return found[-1] if found else None

    def fence(self, attempt: int) -> None:
        """Refuse checkpoints of earlier attempts from now on."""
        with self._lock:
            self._attempt = attempt

    def newest(self) -> CheckpointFile | None:
        """Return the newest undamaged checkpoint, or None. Damaged newer ones are dropped."""
        with self._lock:
            while self._kept:
                newest = self._kept[-1]
                if self._is_whole(newest):
                    return newest
                say(f"the checkpoint of step {newest.step} is damaged; the gang uses the one before")
                self._kept.pop()
            return None

    def entries(self) -> list[CheckpointFile]:
        """Return all kept checkpoints, in the order of their arrival."""
        with self._lock:
            return list(self._kept)

    def saved(self) -> tuple[SavedCheckpoint, ...]:
        """Return the kept checkpoints as the user sees them."""
        return tuple(file.saved(self._vault.own) for file in self.entries())

    def find(self, step: int | None) -> CheckpointFile | None:
        """Return an undamaged checkpoint, or None.

        Args:
            step: Step of the wanted checkpoint, the newest among several. None: the best of all checkpoints.
        """
        with self._lock:
            whole = [file for file in self._kept if self._is_whole(file)]
        return find(whole, self._keep, step)

    def flush(self, timeout: float) -> bool:
        """Wait until storage has the newest and the best checkpoints.

        Args:
            timeout: Most seconds to wait.

        Returns:
            True if storage has the newest checkpoint, or no checkpoint exists.
        """
        return self._vault.flush(timeout)

    def serve(self, connection: Connection, request: Upload | Download) -> None:
        """Receive or send a file, in a thread of the listener.

        Raises:
            OSError: The connection broke, or the disk is full.
            ValueError: The file is damaged, or an older attempt wrote it.
        """
        if isinstance(request, Download):
            connection.send_file(self._folder / request.file.name)
            return
        try:
            self._take(connection, request)
            self.keep(request.file)
        except ValueError:
            with self._lock:
                if request.file.name not in {kept.name for kept in self._kept}:
                    (self._folder / request.file.name).unlink(missing_ok=True)
            raise

    def _take(self, connection: Connection, request: Upload) -> None:
        self._check(request.file)
        if not request.is_there:
            take_file(connection, request.file, self._folder)
        elif (size := (self._folder / request.file.name).stat().st_size) != request.file.size:
            raise ValueError(
                f"the checkpoint of step {request.file.step} has {size:,} bytes, not {request.file.size:,}: its file "
                "was cut short or changed"
            )

    def keep(self, file: CheckpointFile) -> None:
        """Keep a complete file in the folder, and queue its upload.

        Raises:
            ValueError: An older attempt wrote the file.
        """
        file = self._keep_here(file)
        self._vault.offer(file, self._folder / file.name)

    def _keep_here(self, file: CheckpointFile) -> CheckpointFile:
        with self._lock:
            self._check(file)
            before = {other.name: other for other in self._kept}
            if (same := before.pop(file.name, None)) is not None:  # saved again, perhaps without metrics
                file = replace(file, metrics={**same.metrics, **file.metrics})
            self._states[file.name] = _state_of(self._folder / file.name)
            self._kept = retained([*before.values(), file], self._keep)
            for name in before.keys() - {kept.name for kept in self._kept}:
                (self._folder / name).unlink(missing_ok=True)
                self._states.pop(name, None)
        return file

    def _is_whole(self, file: CheckpointFile) -> bool:
        path = self._folder / file.name
        if not path.is_file() or path.stat().st_size != file.size:
            return False
        return _state_of(path) == self._states.get(file.name) or digest_of(path) == file.digest

    def _check(self, file: CheckpointFile) -> None:
        if file.attempt < self._attempt:
            raise ValueError(f"a checkpoint of attempt {file.attempt} came when attempt {self._attempt} was running")


def _state_of(path: Path) -> tuple[int, ...]:
    """Return the file's inode, size and modification time, which change with each write to the file."""
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns  # not st_ctime_ns: it changes when the agent removes its link


@dataclass
class Fetches:
    """Fetches checkpoints from the agents' nodes, one at a time.

    Newer checkpoints replace older ones in the queue, except the best.
    """

    keep: Keep = field(default_factory=Keep)
    kept: Callable[[], Sequence[CheckpointFile]] = tuple
    """Returns the checkpoints on the driver's disk."""
    _on_its_way: tuple[Peer, CheckpointFile] | None = None
    _waiting: list[tuple[Peer, CheckpointFile]] = field(default_factory=list)
    """Queue of fetches, in the order of writing."""
    _num_retries: int = 0
    """Number of retries of the running fetch."""

    @property
    def is_busy(self) -> bool:
        """True while a fetch is running."""
        return self._on_its_way is not None

    def fetch(self, peer: Peer, file: CheckpointFile) -> None:
        """Queue a checkpoint's fetch. Older checkpoints in the queue are skipped, except the best."""
        self._waiting.append((peer, file))
        under_way = [self._on_its_way[1]] if self._on_its_way is not None else []
        files = [*self.kept(), *under_way, *(waiting for _, waiting in self._waiting)]
        stay = retained(files, replace(self.keep, last=1))
        self._waiting = [waiting for waiting in self._waiting if waiting[1] in stay]
        if self._on_its_way is None:
            self._turn()

    def note_end(self, file: CheckpointFile) -> None:
        """Record that a checkpoint has arrived, and begin the next fetch."""
        if self._on_its_way is not None and self._on_its_way[1] == file:
            self._turn()

    def note_failure(self, file: CheckpointFile, *, is_worth_a_retry: bool) -> bool:
        """Record that a checkpoint's fetch has failed, and begin a retry or the next fetch.

        Args:
            file: The checkpoint.
            is_worth_a_retry: True if a retry may succeed.

        Returns:
            True if the checkpoint is given up. False after the start of a retry, or for a fetch that had already ended.
        """
        if self._on_its_way is None or self._on_its_way[1] != file:
            return False
        if is_worth_a_retry and not self._waiting and self._num_retries < MAX_RETRIES:
            self._num_retries += 1
            self._on_its_way[0].send(Fetch(file))
            return False
        self._turn()
        return True

    def forget(self, peer: Peer) -> None:
        """Drop the fetches from a lost agent."""
        self._waiting = [waiting for waiting in self._waiting if waiting[0] is not peer]
        if self._on_its_way is not None and self._on_its_way[0] is peer:
            self._turn()

    def clear(self) -> None:
        """Drop the running fetch and the queue."""
        self._on_its_way = None
        self._waiting.clear()

    def _turn(self) -> None:
        self._on_its_way, self._num_retries = self._waiting.pop(0) if self._waiting else None, 0
        if self._on_its_way is not None:
            peer, file = self._on_its_way
            peer.send(Fetch(file))
