"""Describes and receives a whole checkpoint file. Shared by ranks, agents and the driver."""

import contextlib
import hashlib
import io
import os
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flytekitplugins.daskpytorch.process.folders import replacing
from flytekitplugins.daskpytorch.protocol.framing import Connection
from flytekitplugins.daskpytorch.records import SavedCheckpoint


@dataclass(frozen=True, kw_only=True)
class CheckpointFile:
    """Description of a whole (not sharded) checkpoint, which is one file written by `torch.save`."""

    attempt: int
    """Number of the gang's attempt that wrote the file."""
    step: int
    """Training step of the checkpoint."""
    size: int
    """Size of the file, in bytes."""
    digest: str
    """SHA-256 of the file, in hexadecimal digits."""
    metrics: Mapping[str, float] = field(default_factory=dict, compare=False)  # NaN is not equal to itself
    """Metrics that the checkpoint was saved with."""
    folder: str | None = field(default=None, compare=False)
    """Folder of the file in storage. None: the folder of the manifest that lists the checkpoint."""

    is_evaluated: bool = field(default=False, compare=False)
    """True if `metrics` includes those of `Gang(evaluate=...)`."""

    @property
    def name(self) -> str:
        """Name of the file, the same on all hosts and in storage."""
        return f"step-{self.step}-{self.digest[:16]}.pt"

    @property
    def identity(self) -> str:
        """Text that no other checkpoint of the gang has: the name of the file."""
        return self.name

    def saved(self, folder: str | None) -> SavedCheckpoint:
        """Return the checkpoint's description for the user: step, metrics, size and place in storage.

        Args:
            folder: Folder in storage to which the gang's checkpoints go. None: no storage.
        """
        place = f"{folder}/{self.name}" if folder is not None else None
        return SavedCheckpoint(step=self.step, metrics=self.metrics, size=self.size, place=place)


class HashedFile(io.BufferedWriter):
    """File that computes the SHA-256 of the bytes written to it."""

    def __init__(self, file: io.FileIO) -> None:
        super().__init__(file)
        self.digest = hashlib.sha256()
        """SHA-256 of all bytes that were written so far."""

    def write(self, data: Any) -> int:
        """Write bytes to the file, and add them to `digest`."""
        self.digest.update(data)
        return super().write(data)


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def link_file(file: Path, folder: Path) -> bool:
    """Make a hard link to a file in another folder, under the same name.

    Returns:
        False if no link can be made, for example because the folder is on another disk.
    """
    unfinished = folder / f"unfinished-{file.name}-{uuid.uuid4().hex}"
    try:
        os.link(file, unfinished)
        unfinished.rename(folder / file.name)  # no effect if both names mean the same file
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()
    return True


def take_file(connection: Connection, wanted: CheckpointFile, folder: Path) -> None:
    """Receive a checkpoint file into a folder, atomically.

    Args:
        connection: Connection to the sender.
        wanted: Description of the file.
        folder: Folder for the file.

    Raises:
        EOFError: The connection ended before the file was complete.
        OSError: The file cannot be written.
        ValueError: The received bytes have a wrong digest.
    """
    unfinished = folder / f"unfinished-{wanted.name}-{threading.get_ident()}"
    with replacing(folder / wanted.name, unfinished), HashedFile(io.FileIO(unfinished, "w")) as file:
        for piece in connection.pieces(wanted.size, f"the checkpoint of step {wanted.step}"):
            file.write(piece)
        if file.digest.hexdigest() != wanted.digest:
            raise ValueError(f"the checkpoint of step {wanted.step} was damaged during its transfer")
