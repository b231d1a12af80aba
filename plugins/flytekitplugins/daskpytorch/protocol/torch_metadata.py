"""What is in a sharded checkpoint, as torch has it and as JSON. Runs in ranks and in the driver; imports torch late.

Rank 0's `WrittenShards.state` is made here, and read here again out of the layout that the driver puts it into.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata


def state_of(metadata: Metadata) -> str:
    """The keys, with their paths in the nested state and, of tensors, shape, dtype and chunks."""
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
    """The file `.metadata`, by which `torch.distributed.checkpoint.load` reads the ranks' parts."""
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
    """What there is to load, of a layout that has been parsed."""
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
