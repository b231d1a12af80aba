"""Checkpoint files over a connection, in pieces; whole or not at all. Runs in the driver and in agents."""

from __future__ import annotations

import hashlib
import threading
from multiprocessing.connection import Connection
from pathlib import Path

from flytekitplugins.daskpytorch.protocol.checkpoint_file import CheckpointFile

__all__ = ["send_file", "take_file"]

CHUNK = 1 << 20
"""Bytes per message."""


def send_file(connection: Connection, path: Path) -> None:
    """Send a file in pieces; the receiver knows its size."""
    with path.open("rb") as file:
        while piece := file.read(CHUNK):
            connection.send_bytes(piece)


def take_file(connection: Connection, wanted: CheckpointFile, folder: Path) -> Path:
    """Receive a file, whole or not at all.

    Raises:
        EOFError: The sender went away.
        OSError: It cannot be written here.
        ValueError: What came is not what was announced.
    """
    unfinished = folder / f"unfinished-{wanted.name}-{threading.get_ident()}"
    digest, size = hashlib.sha256(), 0
    try:
        with unfinished.open("wb") as file:
            while size < wanted.size:
                piece = connection.recv_bytes()
                digest.update(piece)
                size += len(piece)
                file.write(piece)
        if size != wanted.size or digest.hexdigest() != wanted.digest:
            raise ValueError(f"the checkpoint of step {wanted.step} was damaged on its way")
        return unfinished.rename(folder / wanted.name)
    finally:
        unfinished.unlink(missing_ok=True)
