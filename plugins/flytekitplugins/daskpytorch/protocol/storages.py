"""Tensors' memory in a pickle: written from where it lies, and used where it was read. Runs in ranks and the driver.

By itself torch copies each storage twice on either side.
"""

import pickle
from collections.abc import Callable
from typing import Any

import torch

from flytekitplugins.daskpytorch.protocol import torch_parts


def reduce(storage: object, at_least: int = 0) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """What a pickler is to write for a storage; None where that is for torch to say, as of a GPU's memory.

    Of one of fewer bytes, too: a storage that comes of this cannot be resized.
    """
    if isinstance(storage, torch.storage.TypedStorage):
        raw = torch_parts.untyped(storage)
        return (_typed, (raw, storage.dtype)) if raw.device.type == "cpu" and raw.nbytes() >= at_least else None
    if isinstance(storage, torch.UntypedStorage) and storage.device.type == "cpu" and storage.nbytes() >= at_least:
        memory = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
        return _raw, (pickle.PickleBuffer(memory.numpy().data),)
    return None


def _typed(raw: torch.storage.TypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    return _of_type(torch_parts.untyped(raw), dtype)


def _raw(memory: bytearray | memoryview) -> torch.storage.TypedStorage:
    """An untyped storage comes out of torch's own pickles as one of bytes, too, and that is what it rebuilds from."""
    tensor = torch.frombuffer(memory, dtype=torch.uint8) if memory else torch.empty(0, device="cpu")
    return _of_type(tensor.untyped_storage(), torch.uint8)


def _of_type(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
        wrap_storage=storage, dtype=dtype, _internal=True
    )
