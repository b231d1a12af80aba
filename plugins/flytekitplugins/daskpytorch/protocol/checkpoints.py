"""Describes whole checkpoints, which are files, and sharded ones, of which each rank writes its own part.

Runs in ranks, agents and driver. Only one attempt writes to the folder of a sharded checkpoint.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from flytekitplugins.daskpytorch.process.folders import replacing
from flytekitplugins.daskpytorch.records import SavedCheckpoint

CHUNK = 8 << 20
"""Bytes per `write` call on a checkpoint's file."""
LENT = "lent"
"""Folder in the driver's folder, with the whole checkpoints that ranks of this attempt may load."""


@dataclass(frozen=True, kw_only=True)
class CheckpointEntry:
    """A checkpoint, as rank 0 reports it and the manifest lists it."""

    attempt: int
    step: int
    size: int = 0
    """Bytes of the file, or of all ranks' objects together."""
    digest: str = ""
    """XXH3 of the file, or SHA-256 of `.metadata`: its pickle may lie where more users can write than the manifest."""
    metrics: Mapping[str, float] = field(default_factory=dict, compare=False)  # NaN is not equal to itself
    is_evaluated: bool = field(default=False, compare=False)
    """`metrics` includes those of `Gang(evaluate=...)`."""
    folder: str | None = field(default=None, compare=False)
    """Path or URL. None for a whole checkpoint in the manifest's own folder, or on the driver's disk."""
    shards: str | None = None
    """Path in `folder` of the ranks' objects. None: a whole checkpoint, which is one file."""

    @property
    def name(self) -> str:
        """Path in `folder`, unique among all drivers' saves, and the same on all hosts."""
        return self.shards or f"step-{self.step}-{self.digest[:16]}.pt"

    @property
    def uri(self) -> str:
        return f"{self.folder}/{self.name}"

    @property
    def is_sharded(self) -> bool:
        return self.shards is not None

    def saved(self, storage: str | None) -> SavedCheckpoint:
        """`storage` is the folder of the whole checkpoints."""
        folder = self.folder if self.is_sharded else storage
        place = f"{folder}/{self.name}" if folder is not None else None
        return SavedCheckpoint(step=self.step, metrics=self.metrics, size=self.size, place=place)


@dataclass(frozen=True)
class Written:
    """Rank 0's report of a save."""

    entry: CheckpointEntry
    """After a failure perhaps without size and digest."""
    failure: str | None = None


class HashedStream:
    """A file to `torch.save`, or an item's part of one."""

    def __init__(self, write: Callable[[memoryview], object]) -> None:
        self._write = write
        self.size = 0
        self.digest = xxhash.xxh3_128()

    def write(self, data: Any) -> int:
        self.digest.update(data)
        for start in range(0, len(data), CHUNK):
            self._write(data[start : start + CHUNK])
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        """The file is flushed when it is closed."""


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def take_file(pieces: Iterable[bytes], path: Path, what: str, digest: str | None = None) -> None:
    """Write a received file, atomically. ValueError: it has another digest."""
    found, unfinished = xxhash.xxh3_128(), path.with_name(f"unfinished-{path.name}-{uuid.uuid4().hex}")
    with replacing(path, unfinished), unfinished.open("wb") as file:
        for piece in pieces:
            file.write(piece)
            if digest is not None:
                found.update(piece)
        if digest not in (None, found.hexdigest()):
            raise ValueError(f"{what} was damaged during its transfer")


# ---- Sharded checkpoints


METADATA = ".metadata"
"""Object in which torch lists the tensors and values of a sharded checkpoint, with our digests."""
OBJECT = re.compile(r"__\d+_\d+\.distcp|\.metadata")
"""Objects of a sharded checkpoint."""
FOLDER = re.compile(r"step-(?:-?\d+)/(\d+)-(\d+)-(\w+)")
"""Its groups: the attempt's number, the save's number, and the driver's nonce."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    base: str
    """Path or fsspec URL of the folder that has a folder for each sharded checkpoint."""
    nonce: str
    """Random digits of the driver in the names of its folders, so that no other driver writes there."""
    token: str | None = None
    """File of the driver, by which a rank sees that it shares the folder `base`. None for a URL."""
    start: tuple[CheckpointEntry, ...] = ()


def folder_name(attempt: int, nonce: str, step: int, number: int) -> str:
    """Return a save's folder, relative to `Sharding.base`. `number` counts `save_sharded` calls from 0."""
    return f"step-{step}/{attempt}-{number}-{nonce}"


def save_of(folder: str) -> tuple[tuple[int, int], str] | None:
    """Return attempt number, save number and nonce, or None if the folder is not a save's."""
    found = FOLDER.fullmatch(folder)
    return None if found is None else ((int(found[1]), int(found[2])), found[3])
