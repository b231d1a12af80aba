"""Converts the contents of a sharded checkpoint between torch's metadata and JSON. Runs in ranks and in the driver.

Rank 0 makes `WrittenShards.state` with this module. The driver puts that state into the layout, from which this module
makes torch's metadata again. Torch is imported late.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata


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
