"""Describes checkpoints: whole ones, which are files, and sharded ones, of which each rank writes its own part.

Shared by ranks, agents, driver and storage. One folder contains all objects of a sharded checkpoint: the ranks' parts,
their layout (`layout.json`), and the same layout in torch's format for plain `torch.distributed.checkpoint.load`
(`.metadata`). Only one attempt writes there.

Rank 0 describes the whole state in JSON (`WrittenShards.state`). The driver puts the description into the layout, from
which `metadata_of` makes torch's metadata again. Torch is imported late.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import re
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flytekitplugins.daskpytorch.process.folders import replacing
from flytekitplugins.daskpytorch.protocol.framing import Connection
from flytekitplugins.daskpytorch.records import SavedCheckpoint

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata


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


LAYOUT = "layout.json"
"""Name of the object that lists the tensors and values in a sharded checkpoint's other objects."""
METADATA = ".metadata"
"""Name of the object that only plain `torch.distributed.checkpoint.load` reads. Gangs read `layout.json` instead."""
OBJECT = re.compile(r"(__\d+_\d+\.distcp|layout\.json|\.metadata)(\.[0-9a-f]{32})?")
"""Matches names of a sharded checkpoint's objects. The name of an unfinished one ends in 32 hexadecimal digits."""
FOLDER = re.compile(r"step-(?:-?\d+)/(\d+)-(\d+)-(\w+)")
"""Matches a sharded checkpoint's folder. Groups: the attempt's number, the save's number, and the driver's nonce."""


@dataclass(frozen=True, kw_only=True)
class StoredPart:
    """One object in storage that a rank has written for a sharded checkpoint."""

    name: str
    """Name of the object in the checkpoint's folder."""
    size: int
    """Size of the object, in bytes. The object needs no digest, since each tensor or value in it has one."""


@dataclass(frozen=True, kw_only=True)
class StoredItem:
    """Position in storage of an item: a tensor's chunk, or another value. Loads read it whole and check its digest."""

    key: str
    """Key of the value in the flattened state."""
    offset: tuple[int, ...] | None
    """Offsets of the chunk in the whole tensor, one per dimension. None for other values than tensors."""
    index: int | None
    """Number of the chunk in the tensor, as torch counts chunks. None: no number."""
    part: str
    """Name of the stored object that contains the item."""
    start: int
    """Offset of the item in the stored object `part`, in bytes."""
    length: int
    """Length of the item, in bytes."""
    digest: str
    """XXH3 digest (128 bits) of the item's bytes, in hexadecimal digits. XXH3 is 20 times as fast as SHA-256."""


@dataclass(frozen=True, kw_only=True)
class WrittenShards:
    """A rank's report that it has written its part of a sharded checkpoint to storage, or has failed to."""

    attempt: int
    """Number of the gang's attempt that wrote the checkpoint."""
    number: int
    """Number of the attempt's `save_sharded` call, from 0. Several calls may have the same training step."""
    step: int
    parts: tuple[StoredPart, ...] = ()
    items: tuple[StoredItem, ...] = ()
    state: str | None = None
    """Keys of the state with their shapes, dtypes and chunks, as JSON, from rank 0. None from other ranks."""
    metrics: Mapping[str, float] = field(default_factory=dict, compare=False)
    failure: str | None = None
    """Reason why the rank could not write its part. None: the part is written."""


@dataclass(frozen=True, kw_only=True)
class ShardedCheckpoint:
    """Committed sharded checkpoint, as listed in the manifest and sent to ranks of a later attempt."""

    attempt: int
    """Number of the gang's attempt that wrote the checkpoint."""
    step: int
    """Training step of the checkpoint."""
    world_size: int
    """Number of ranks that wrote the checkpoint."""
    uri: str
    """Path or fsspec URL of the checkpoint's folder."""
    size: int
    """Size of all ranks' objects together, in bytes."""
    layout_digest: str
    """SHA-256 of the checkpoint's `layout.json`, in hexadecimal digits."""
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


def layout_of(written: Sequence[WrittenShards]) -> bytes:
    """Return the content of `layout.json`, which lists all objects, tensors and values of a sharded checkpoint.

    Args:
        written: Reports of all ranks about their parts, in rank order.
    """
    first = written[0]
    content = {
        "attempt": first.attempt,
        "number": first.number,
        "step": first.step,
        "world_size": len(written),
        "metrics": dict(first.metrics),
        "state": json.loads(first.state or "null"),
        "parts": [asdict(part) for each in written for part in each.parts],
        "items": [asdict(item) for each in written for item in each.items],
    }
    return json.dumps(content).encode()


# ---- Torch's metadata


def state_of(metadata: Metadata) -> str:
    """Return JSON with each key's path in the nested state, and the shape, dtype and chunks of each tensor.

    Args:
        metadata: Torch's metadata of the whole state.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    keys: dict[str, dict[str, Any]] = {}
    for key, entry in metadata.state_dict_metadata.items():
        keys[key] = {"path": metadata.planner_data[key]}
        if isinstance(entry, TensorStorageMetadata):
            keys[key] |= {
                "dtype": str(entry.properties.dtype).removeprefix("torch."),
                "size": list(entry.size),
                "chunks": [[list(chunk.offsets), list(chunk.sizes)] for chunk in entry.chunks],
            }
    return json.dumps(keys)


def metadata_of(layout: bytes) -> bytes:
    """Return the content of the file `.metadata`, with which `torch.distributed.checkpoint.load` reads the shards.

    Args:
        layout: The content of the checkpoint's `layout.json`.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta

    content = json.loads(layout)
    metadata = from_layout(content)
    metadata.storage_data = {
        MetadataIndex(item["key"], item["offset"], item["index"]): _StorageInfo(
            item["part"], item["start"], item["length"]
        )
        for item in content["items"]
    }
    metadata.storage_meta = StorageMeta()
    return pickle.dumps(metadata)


def from_layout(layout: Mapping[str, Any]) -> Metadata:
    """Return torch's metadata of a sharded checkpoint's keys, without positions in storage.

    Args:
        layout: The parsed content of the checkpoint's `layout.json`.
    """
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

    keys = layout["state"]
    return Metadata(
        {key: _tensor(entry) if "size" in entry else BytesStorageMetadata() for key, entry in keys.items()},
        planner_data={key: tuple(entry["path"]) for key, entry in keys.items()},
    )


def _tensor(entry: Mapping[str, Any]) -> Any:
    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

    return TensorStorageMetadata(
        properties=TensorProperties(dtype=getattr(torch, entry["dtype"])),
        size=torch.Size(entry["size"]),
        chunks=[ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in entry["chunks"]],
    )
