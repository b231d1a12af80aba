"""Describes sharded checkpoints, of which each rank writes its own part. Shared by ranks, driver and storage.

One folder contains all objects of a checkpoint: the ranks' parts, their layout (`layout.json`), and the same layout in
torch's format for plain `torch.distributed.checkpoint.load` (`.metadata`). Only one attempt writes there.

Rank 0 describes the whole state in JSON (`WrittenShards.state`). The driver puts the description into the layout, from
which `metadata_of` makes torch's metadata again. Torch is imported late.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from flytekitplugins.daskpytorch.records import SavedCheckpoint

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

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
