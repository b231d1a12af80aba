"""Files between the driver and the ranks of a node: whole checkpoints, and a call's large arguments. Runs in ranks.

on the driver's machine    ranks write and read checkpoints in the driver's folder
elsewhere                  rank 0 uploads a checkpoint

The first rank that needs another file downloads it to the agent's folder, where the node's other ranks find it.
"""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from flytekitplugins.daskpytorch.protocol import messages
from flytekitplugins.daskpytorch.protocol.checkpoints import LENT, CheckpointEntry, digest_of, take_file
from flytekitplugins.daskpytorch.protocol.framing import Connection, dial
from flytekitplugins.daskpytorch.protocol.job import LargeCall, RankOrder

UNWRITTEN = "saving-"
"""Prefix of the name of a checkpoint's file that is being written."""
ARGUMENTS = "arguments-"


class Transfers:
    def __init__(self, order: RankOrder, moved: Callable[[], object] = lambda: None) -> None:
        """`moved` is called as a sign of life while bytes flow."""
        self._agent = order.agent
        self.scratch = Path(order.scratch)
        self._shared = Path(order.driver_folder) if order.driver_folder is not None else None
        self.folder = self._shared or self.scratch
        """Where rank 0 writes its checkpoints."""
        self._moved = moved

    def tidy(self) -> None:
        """Remove what a killed rank 0 of an earlier attempt has left unfinished."""
        for unfinished in self.folder.glob(f"{UNWRITTEN}*"):
            unfinished.unlink(missing_ok=True)

    def deliver(self, file: CheckpointEntry) -> None:
        """Bring a checkpoint's file from `folder` to the driver. OSError or EOFError: it did not arrive."""
        if self._shared is not None:
            return
        with contextlib.closing(dial(self._agent)) as connection:
            connection.send(messages.Upload(file))
            connection.send_file(self.scratch / file.name, self._moved)
            _check(connection)
        for old in self.scratch.glob("step-*.pt"):  # the driver has all that may still be loaded
            if old.name != file.name:
                old.unlink(missing_ok=True)

    def fetch(self, file: CheckpointEntry) -> Path:
        """Return the path of a checkpoint's file that the driver lends. OSError, EOFError or ValueError: none came."""
        if self._shared is not None:
            return self._shared / LENT / file.name
        path = self.scratch / file.name
        with self._once_a_node():
            if not path.exists() or digest_of(path) != file.digest:
                self._download(file.name, path, file.size, f"the checkpoint of step {file.step}", file.digest)
        return path

    def arguments(self, call: LargeCall) -> Path:
        """Return the path of a large call. OSError or EOFError: none came."""
        path = self.scratch / f"{ARGUMENTS}{call.number}"
        with self._once_a_node():
            if not path.exists():
                for old in self.scratch.glob(f"{ARGUMENTS}*"):  # an ended call's
                    old.unlink(missing_ok=True)
                self._download(messages.CALL, path, call.size, "the call's large arguments")
        return path

    def _download(self, name: str, path: Path, size: int, what: str, digest: str | None = None) -> None:
        with contextlib.closing(dial(self._agent)) as connection:
            connection.send(messages.Download(name))
            _check(connection)
            take_file(self._watched(connection, size, what), path, what, digest)

    def _watched(self, connection: Connection, size: int, what: str) -> Iterator[bytes]:
        for piece in connection.pieces(size, what):
            self._moved()
            yield piece

    @contextlib.contextmanager
    def _once_a_node(self) -> Iterator[None]:
        lock = os.open(self.scratch / "downloads.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with contextlib.suppress(OSError):  # without locks, each rank may download the file
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


def _check(connection: Connection) -> None:
    if (refusal := connection.recv()) is not None:
        raise OSError(refusal)
