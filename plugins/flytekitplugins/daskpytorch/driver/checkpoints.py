"""A gang's checkpoints: brought from its nodes, and safe on the driver's disk when workers die. Runs in the driver.

The driver is the only writer. It takes files whole or not at all, refuses those of older attempts, keeps the last
few, and hands the newest on to storage (see `upload`), so that the task's next attempt starts from it.
"""

import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from flytekitplugins.daskpytorch.driver.agents import Peer
from flytekitplugins.daskpytorch.driver.upload import StorageUpload
from flytekitplugins.daskpytorch.protocol.checkpoint_file import CheckpointFile, digest_of, take_file
from flytekitplugins.daskpytorch.protocol.framing import Connection
from flytekitplugins.daskpytorch.protocol.messages import Download, Fetch, Upload

__all__ = ["Checkpoints", "Fetches"]

NUM_KEPT = 3
"""How many checkpoints stay on disk: the newest, and those before it should it turn out to be damaged."""
MAX_RETRIES = 2
"""How often a checkpoint is asked for again whose connection broke."""


class Checkpoints:
    """Keeps the newest checkpoints of one gang."""

    def __init__(self, folder: Path, storage: StorageUpload | None) -> None:
        self._folder = folder
        self._storage = storage
        self._lock = threading.Lock()
        self._kept: list[CheckpointFile] = []
        self._states: dict[str, tuple[int, ...]] = {}
        """By name, what the disk says of a file whose digest is right: unless that changes, it still is."""
        self._attempt = 0

    def restore(self) -> CheckpointFile | None:
        """Take over what the attempt before left in storage, and carry it forward to where the next will look."""
        found = self._storage.restore(self._folder) if self._storage else None
        if found is not None:
            self.keep(found)
        return found

    def fence(self, attempt: int) -> None:
        """From now on only this attempt's checkpoints are taken."""
        with self._lock:
            self._attempt = attempt

    def newest(self) -> CheckpointFile | None:
        """The newest checkpoint that is still whole; damaged ones are dropped."""
        with self._lock:
            while self._kept:
                newest = self._kept[-1]
                if self._is_whole(newest):
                    return newest
                print(f"the checkpoint of step {newest.step} is damaged; the one before is taken", file=sys.stderr)
                self._kept.pop()
            return None

    def flush(self, timeout: float) -> bool:
        """Wait until the newest checkpoint is in storage, too; whether it is."""
        return self._storage is None or self._storage.flush(timeout)

    def close(self) -> None:
        """Send nothing more to storage."""
        if self._storage is not None:
            self._storage.close()

    def serve(self, connection: Connection, request: Upload | Download) -> None:
        """Take or give one file, in a thread of the listener.

        Raises:
            OSError: The connection broke, or the disk is full.
            ValueError: The file is damaged, or is that of an older attempt.
        """
        if isinstance(request, Download):
            connection.send_file(self._folder / request.file.name)
            return
        self._check(request.file)
        path = take_file(connection, request.file, self._folder)
        try:
            self.keep(request.file)
        except ValueError:
            with self._lock:
                if request.file.name not in {kept.name for kept in self._kept}:
                    path.unlink()
            raise

    def keep(self, file: CheckpointFile) -> None:
        """Take a file that lies whole in the folder, and hand it on to storage.

        Raises:
            ValueError: It is that of an older attempt.
        """
        with self._lock:
            self._check(file)
            self._kept = [other for other in self._kept if other.name != file.name]
            self._kept.append(file)
            self._states[file.name] = _state_of(self._folder / file.name)
            for old in self._kept[:-NUM_KEPT]:
                (self._folder / old.name).unlink(missing_ok=True)
                self._states.pop(old.name, None)
            self._kept = self._kept[-NUM_KEPT:]
        if self._storage is not None:
            self._storage.offer(file, self._folder / file.name)

    def _is_whole(self, file: CheckpointFile) -> bool:
        path = self._folder / file.name
        if not path.is_file() or path.stat().st_size != file.size:
            return False
        return _state_of(path) == self._states.get(file.name) or digest_of(path) == file.digest

    def _check(self, file: CheckpointFile) -> None:
        if file.attempt < self._attempt:
            raise ValueError(f"a checkpoint of attempt {file.attempt} came when attempt {self._attempt} was running")


def _state_of(path: Path) -> tuple[int, ...]:
    """Changes whenever somebody writes to the file."""
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


@dataclass
class Fetches:
    """Has checkpoints brought from the agents' nodes: one at a time, and the newest next."""

    _on_its_way: tuple[Peer, CheckpointFile] | None = None
    _next: tuple[Peer, CheckpointFile] | None = None
    _num_retries: int = 0
    """Of what is on its way."""

    @property
    def is_busy(self) -> bool:
        """Something is on its way."""
        return self._on_its_way is not None

    def fetch(self, peer: Peer, file: CheckpointFile) -> None:
        """Have a checkpoint brought; one that still waits for its turn is passed over."""
        if self._on_its_way is not None:
            self._next = (peer, file)
            return
        self._on_its_way, self._num_retries = (peer, file), 0
        peer.send(Fetch(file))

    def note_end(self, file: CheckpointFile) -> None:
        """This one has arrived."""
        if self._on_its_way is not None and self._on_its_way[1] == file:
            self._turn()

    def note_failure(self, file: CheckpointFile, *, is_worth_a_retry: bool) -> bool:
        """This one has not arrived; whether it will not, which is said once."""
        if self._on_its_way is None or self._on_its_way[1] != file:
            return False
        if is_worth_a_retry and self._next is None and self._num_retries < MAX_RETRIES:
            self._num_retries += 1
            self._on_its_way[0].send(Fetch(file))
            return False
        self._turn()
        return True

    def forget(self, peer: Peer) -> None:
        """An agent has gone, and what it was to bring."""
        if self._next is not None and self._next[0] is peer:
            self._next = None
        if self._on_its_way is not None and self._on_its_way[0] is peer:
            self._turn()

    def clear(self) -> None:
        """Expect nothing more."""
        self._on_its_way = self._next = None

    def _turn(self) -> None:
        self._on_its_way, waiting, self._next = None, self._next, None
        if waiting is not None:
            self.fetch(*waiting)
