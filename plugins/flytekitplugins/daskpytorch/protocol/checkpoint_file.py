"""A checkpoint that is written whole, as rank, agent and driver name it to each other."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CheckpointFile", "digest_of"]


@dataclass(frozen=True, kw_only=True)
class CheckpointFile:
    """A whole checkpoint, written by `torch.save`."""

    attempt: int
    """The incarnation of the gang that wrote it."""
    step: int
    """The training step that it belongs to."""
    size: int
    """In bytes."""
    digest: str
    """SHA-256 of the file, in hexadecimal digits."""

    @property
    def name(self) -> str:
        """The file's name, the same on every host and in storage."""
        return f"step-{self.step}-{self.digest[:16]}.pt"


def digest_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
