"""A checkpoint that is written whole, as rank, agent and driver name it to each other, and how it is received."""

import contextlib
import hashlib
import os
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flytekitplugins.daskpytorch.context import SavedCheckpoint
from flytekitplugins.daskpytorch.protocol.framing import Connection

CHUNK = 1 << 20
"""Bytes to take at a time."""


@dataclass(frozen=True, kw_only=True)
class CheckpointFile:
    """A whole checkpoint, written by `torch.save`."""

    attempt: int
    """The attempt of the gang that wrote it."""
    step: int
    size: int
    """In bytes."""
    digest: str
    """SHA-256 of the file, in hexadecimal digits."""
    metrics: Mapping[str, float] = field(default_factory=dict, compare=False)  # NaN is not equal to itself
    """What it was saved with."""
    folder: str | None = field(default=None, compare=False)
    """Where it is in storage, if not beside the manifest."""

    @property
    def name(self) -> str:
        """The file's name, the same on every host and in storage."""
        return f"step-{self.step}-{self.digest[:16]}.pt"

    def saved(self, folder: str | None) -> SavedCheckpoint:
        """What a user is told of it, where all go to this folder in storage, or to none."""
        place = f"{folder}/{self.name}" if folder is not None else None
        return SavedCheckpoint(step=self.step, metrics=self.metrics, size=self.size, place=place)


def digest_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def link_file(file: Path, folder: Path) -> bool:
    """Have a file in another folder, too, under its own name: the same bytes, once on the disk, whole at once.

    False where that cannot be: it is another machine's folder, or on another disk.
    """
    unfinished = folder / f"unfinished-{file.name}-{uuid.uuid4().hex}"
    try:
        os.link(file, unfinished)
        unfinished.rename(folder / file.name)  # does nothing where this is that file already
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()
    return True


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
