"""Takes checkpoint files from a connection, whole or not at all. Runs in the driver and in agents."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

from flytekitplugins.daskpytorch.protocol.checkpoint_file import CheckpointFile
from flytekitplugins.daskpytorch.protocol.framing import Connection

__all__ = ["take_file"]

CHUNK = 1 << 20
"""Bytes to take at a time."""


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
                if not (piece := connection.read(min(CHUNK, wanted.size - size))):
                    raise EOFError(f"the checkpoint of step {wanted.step} ended after {size:,} of its bytes")
                digest.update(piece)
                size += len(piece)
                file.write(piece)
        if digest.hexdigest() != wanted.digest:
            raise ValueError(f"the checkpoint of step {wanted.step} was damaged on its way")
        return unfinished.rename(folder / wanted.name)
    finally:
        unfinished.unlink(missing_ok=True)
