"""Describes checkpoints: whole ones, which are files, and sharded ones, of which each rank writes its own part.

Shared by ranks, agents, driver and storage. One folder contains all objects of a sharded checkpoint. Only one attempt
writes there.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
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


# ---- Sharded checkpoints


METADATA = ".metadata"
"""Name of the object in which torch lists the tensors and values of a sharded checkpoint."""
DIGESTS = "digests.json"
"""Name of the object with the sizes of a sharded checkpoint's other objects, and the digests of what is in them."""
OBJECT = re.compile(r"(__\d+_\d+\.distcp|digests\.json|\.metadata)(\.[0-9a-f]{32})?")
"""Matches names of a sharded checkpoint's objects. The name of an unfinished one ends in 32 hexadecimal digits."""
FOLDER = re.compile(r"step-(?:-?\d+)/(\d+)-(\d+)-(\w+)")
"""Matches a sharded checkpoint's folder. Groups: the attempt's number, the save's number, and the driver's nonce."""


@dataclass(frozen=True, kw_only=True)
class WrittenShards:
    """Rank 0's report that all ranks have written a sharded checkpoint to storage, or that a rank has failed to."""

    attempt: int
    """Number of the gang's attempt that wrote the checkpoint."""
    number: int
    """Number of the attempt's `save_sharded` call, from 0. Several calls may have the same training step."""
    step: int
    size: int = 0
    """Size of all ranks' objects together, in bytes."""
    digest: str = ""
    """SHA-256 of the checkpoint's `digests.json`, in hexadecimal digits."""
    metrics: Mapping[str, float] = field(default_factory=dict, compare=False)
    failure: str | None = None
    """Reason why the checkpoint could not be written. None: it is written."""


@dataclass(frozen=True, kw_only=True)
class ShardedCheckpoint:
    """Committed sharded checkpoint, as listed in the manifest and sent to ranks of a later attempt."""

    attempt: int
    """Number of the gang's attempt that wrote the checkpoint."""
    step: int
    """Training step of the checkpoint."""
    uri: str
    """Path or fsspec URL of the checkpoint's folder."""
    size: int
    """Size of all ranks' objects together, in bytes."""
    digest: str
    """SHA-256 of the checkpoint's `digests.json`, in hexadecimal digits."""
    metrics: Mapping[str, float] = field(default_factory=dict, compare=False)
    is_evaluated: bool = field(default=False, compare=False)
    """True if `metrics` includes those of `Gang(evaluate=...)`."""

    @property
    def name(self) -> str:
        """Last two parts of the folder's path, unique among all drivers' saves."""
        return "/".join(self.uri.split("/")[-2:])

    @property
    def identity(self) -> str:
        """Text that no other checkpoint of the gang has: the path or URL of the folder."""
        return self.uri

    @property
    def saved(self) -> SavedCheckpoint:
        """The checkpoint's description for the user: step, metrics, size and folder."""
        return SavedCheckpoint(step=self.step, metrics=self.metrics, size=self.size, place=self.uri)


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Storage for the shards that an attempt saves, and sharded checkpoints from which the attempt may start."""

    base: str
    """Path or fsspec URL of the folder that contains a folder for each sharded checkpoint."""
    nonce: str
    """Random digits of the driver in the names of its checkpoints' folders. No other driver writes there."""
    token: str | None = None
    """Path of a file that the driver has written. A rank that sees it shares the folder `base`. None for a URL."""
    start: tuple[ShardedCheckpoint, ...] = ()
    """Committed checkpoints from which the attempt may start, the newest first."""


def folder_name(attempt: int, nonce: str, step: int, number: int) -> str:
    """Return the path of a save's own folder, relative to the folder of all sharded checkpoints.

    Args:
        attempt: Number of the gang's attempt.
        nonce: Random digits of the driver.
        step: Training step of the save.
        number: Number of the attempt's `save_sharded` call, from 0.
    """
    return f"step-{step}/{attempt}-{number}-{nonce}"


def is_object(name: str) -> bool:
    """Return True for the name of an object that this package writes into a sharded checkpoint's folder."""
    return OBJECT.fullmatch(name) is not None


def save_of(folder: str) -> tuple[tuple[int, int], str] | None:
    """Return attempt number, save number and driver's nonce, as read from the path of a save's folder.

    Args:
        folder: Path of a folder, relative to the folder of all sharded checkpoints.

    Returns:
        ((attempt number, save number), nonce). None: the folder is not a save's.
    """
    found = FOLDER.fullmatch(folder)
    return None if found is None else ((int(found[1]), int(found[2])), found[3])
