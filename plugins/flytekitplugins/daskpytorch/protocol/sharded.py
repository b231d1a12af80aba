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
"""Object that lists the items in the checkpoint's other objects."""
METADATA = ".metadata"
"""Object that plain `torch.distributed.checkpoint.load` reads. No code of this package reads the object."""
OBJECT = re.compile(r"(__\d+_\d+\.distcp|layout\.json|\.metadata)(\.[0-9a-f]{32})?")
"""Matches the objects of a checkpoint's folder. The name of an unfinished object ends in 32 hexadecimal digits."""
FOLDER = re.compile(r"step-(?:-?\d+)/(\d+)-(\d+)-(\w+)")
"""Matches a checkpoint's folder: the attempt's number, the save's number and the driver's nonce."""


@dataclass(frozen=True, kw_only=True)
class StoredPart:
    """One object that a rank has written."""

    name: str
    """Name in the checkpoint's folder."""
    size: int
    """Size in bytes. The object contains only items, each with a digest."""


@dataclass(frozen=True, kw_only=True)
class StoredItem:
    """Position of a tensor's chunk, or of another value. Items are read whole, and only with the right digest."""

    key: str
    """Key of the value in the flattened state."""
    offset: tuple[int, ...] | None
    """Offsets of the chunk in the whole tensor, one per dimension. None for other values than tensors."""
    index: int | None
    """Number of the chunk in the tensor, as torch counts chunks. None: no number."""
    part: str
    """Name of the object that contains the item."""
    start: int
    """Offset of the item in the object, in bytes."""
    length: int
    """Length of the item, in bytes."""
    digest: str
    """XXH3 of the item's bytes, 128 bits in hexadecimal digits. XXH3 shows damage, 20 times as fast as SHA-256."""


@dataclass(frozen=True, kw_only=True)
class WrittenShards:
    """One rank's part of a checkpoint, as written to storage."""

    attempt: int
    """Number of the gang's attempt that wrote the checkpoint."""
    number: int
    """Number of the attempt's call of `save_sharded`, from 0. A step may have several saves."""
    step: int
    parts: tuple[StoredPart, ...]
    items: tuple[StoredItem, ...]
    state: str | None
    """Keys of the state with their shapes, dtypes and chunks, as JSON, from rank 0. None from other ranks."""
    metrics: Mapping[str, float] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, kw_only=True)
class ShardedCheckpoint:
    """Committed checkpoint, as listed in the manifest and sent to ranks of a later attempt."""

    attempt: int
    """Number of the gang's attempt that wrote the checkpoint."""
    step: int
    """Training step of the checkpoint."""
    world_size: int
    """Number of ranks that wrote the checkpoint."""
    uri: str
    """Path or fsspec URL of the checkpoint's folder."""
    size: int
    """Size of all parts together, in bytes."""
    layout_digest: str
    """SHA-256 of `layout.json`."""
    metrics: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def saved(self) -> SavedCheckpoint:
        """The checkpoint as the user sees it."""
        return SavedCheckpoint(step=self.step, metrics=self.metrics, size=self.size, place=self.uri)


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Storage for an attempt's shards, and checkpoints from which the attempt may start."""

    base: str
    """Path or fsspec URL of the folder that contains a folder for each checkpoint."""
    nonce: str
    """Random digits of the driver in the names of its checkpoints' folders. No other driver writes there."""
    token: str | None = None
    """Path of a file on the driver's disk. A rank that sees the file shares the local `base`. None: `base` is a URL."""
    start: tuple[ShardedCheckpoint, ...] = ()
    """Committed checkpoints, the newest first."""
    cache: str | None = None
    """Folder on each node for copies of the newest shards. None: no copies."""


def folder_name(attempt: int, nonce: str, step: int, number: int) -> str:
    """Return the folder of one save, relative to `Sharding.base`. Each save has its own folder."""
    return f"step-{step}/{attempt}-{number}-{nonce}"


def is_object(name: str) -> bool:
    """Return True for the name of an object that this package writes into a checkpoint's folder."""
    return OBJECT.fullmatch(name) is not None


def save_of(folder: str) -> tuple[tuple[int, int], str] | None:
    """Return attempt, number and driver's nonce of a save, from its folder.

    Args:
        folder: Folder, relative to `Sharding.base`.

    Returns:
        None for other folders.
    """
    found = FOLDER.fullmatch(folder)
    return None if found is None else ((int(found[1]), int(found[2])), found[3])


def layout_of(written: Sequence[WrittenShards]) -> bytes:
    """Return the content of `layout.json`.

    Args:
        written: Parts of all ranks, in rank order.
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
    """Return JSON with each key's path in the nested state, and the shape, dtype and chunks of each tensor."""
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
    """Return torch's metadata of the keys in a parsed layout, without the positions of their bytes."""
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
