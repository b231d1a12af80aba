"""A gang's checkpoints: brought from its nodes, and safe on the driver's disk when workers die. Runs in the driver.

The driver is the only writer. It takes files whole or not at all, refuses those of older attempts, keeps the last
few and the best, and hands them on to storage (see `vault`), so that the task's next attempt starts from the newest.
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
"""How often a checkpoint is asked for again whose connection broke."""


class Checkpoints:
    """Keeps the newest checkpoints of one gang, and the best."""

    def __init__(self, folder: Path, vault: Vault) -> None:
        self._folder = folder
        self._vault = vault
        self._keep = vault.keep
        self._lock = threading.Lock()
        self._kept: list[CheckpointFile] = []
        self._states: dict[str, tuple[int, ...]] = {}
        """By name, what the disk says of a file whose digest is right: unless that changes, it still is."""
        self._attempt = 0

    def restore(self) -> CheckpointFile | None:
        """Take over what the attempt before left in storage; return what to go on from."""
        found = self._vault.restore(self._folder)
        for file in found:
            self._keep_here(file)
        return found[-1] if found else None

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
                say(f"the checkpoint of step {newest.step} is damaged; the one before is taken")
                self._kept.pop()
            return None

    def entries(self) -> list[CheckpointFile]:
        """All that are kept, in the order in which they came."""
        with self._lock:
            return list(self._kept)

    def saved(self) -> tuple[SavedCheckpoint, ...]:
        """What a user is told of them."""
        return tuple(file.saved(self._vault.own) for file in self.entries())

    def find(self, step: int | None) -> CheckpointFile | None:
        """The newest whole one of this step or, with None, the best; None: there is none."""
        with self._lock:
            whole = [file for file in self._kept if self._is_whole(file)]
        return find(whole, self._keep, step)

    def flush(self, timeout: float) -> bool:
        """Wait until the newest checkpoint is in storage, too, and the best; return True if the newest is."""
        return self._vault.flush(timeout)

    def serve(self, connection: Connection, request: Upload | Download) -> None:
        """Take or give one file, in a thread of the listener.

        Raises:
            OSError: The connection broke, or the disk is full.
            ValueError: The file is damaged, or is that of an older attempt.
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
                f"the checkpoint of step {request.file.step} has {size:,} bytes, not {request.file.size:,}"
            )

    def keep(self, file: CheckpointFile) -> None:
        """Take a file that lies whole in the folder, and hand it on to storage.

        Raises:
            ValueError: It is that of an older attempt.
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
    """Changes whenever somebody writes to the file."""
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns  # not st_ctime_ns: the agent may have it, too, and drop it


@dataclass
class Fetches:
    """Has checkpoints brought from the agents' nodes, one at a time: the newest next, but for those among the best."""

    keep: Keep = field(default_factory=Keep)
    kept: Callable[[], Sequence[CheckpointFile]] = tuple
    """Those that have arrived."""
    _on_its_way: tuple[Peer, CheckpointFile] | None = None
    _waiting: list[tuple[Peer, CheckpointFile]] = field(default_factory=list)
    """In the order in which they were written."""
    _num_retries: int = 0
    """Of what is on its way."""

    @property
    def is_busy(self) -> bool:
        """Something is on its way."""
        return self._on_its_way is not None

    def fetch(self, peer: Peer, file: CheckpointFile) -> None:
        """Have a checkpoint brought; one that still waits for its turn is passed over, unless it is among the best."""
        self._waiting.append((peer, file))
        under_way = [self._on_its_way[1]] if self._on_its_way is not None else []
        files = [*self.kept(), *under_way, *(waiting for _, waiting in self._waiting)]
        stay = retained(files, replace(self.keep, last=1))
        self._waiting = [waiting for waiting in self._waiting if waiting[1] in stay]
        if self._on_its_way is None:
            self._turn()

    def note_end(self, file: CheckpointFile) -> None:
        """This one has arrived."""
        if self._on_its_way is not None and self._on_its_way[1] == file:
            self._turn()

    def note_failure(self, file: CheckpointFile, *, is_worth_a_retry: bool) -> bool:
        """This one has not arrived; whether it will not, which is said once."""
        if self._on_its_way is None or self._on_its_way[1] != file:
            return False
        if is_worth_a_retry and not self._waiting and self._num_retries < MAX_RETRIES:
            self._num_retries += 1
            self._on_its_way[0].send(Fetch(file))
            return False
        self._turn()
        return True

    def forget(self, peer: Peer) -> None:
        """An agent has gone, and what it was to bring."""
        self._waiting = [waiting for waiting in self._waiting if waiting[0] is not peer]
        if self._on_its_way is not None and self._on_its_way[0] is peer:
            self._turn()

    def clear(self) -> None:
        """Expect nothing more."""
        self._on_its_way = None
        self._waiting.clear()

    def _turn(self) -> None:
        self._on_its_way, self._num_retries = self._waiting.pop(0) if self._waiting else None, 0
        if self._on_its_way is not None:
            peer, file = self._on_its_way
            peer.send(Fetch(file))
