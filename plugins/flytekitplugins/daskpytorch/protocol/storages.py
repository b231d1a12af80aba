"""Pickles tensors' memory without copies, in ranks and the driver. Torch alone copies each storage twice per side."""

import pickle
from collections.abc import Callable
from typing import Any

import torch

from flytekitplugins.daskpytorch.protocol import torch_parts


def reduce(storage: object, at_least: int = 0) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """Return how to pickle a storage in main memory without copies, as `__reduce_ex__` does. None leaves it to torch.

    The unpickled storage cannot be resized.

    Args:
        storage: Any object. Storages of GPUs, and other objects, give None.
        at_least: Least bytes of a storage. Smaller storages give None.
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
    """Make a storage of bytes, from which torch rebuilds tensors of untyped storages, as from its own pickles."""
    tensor = torch.frombuffer(memory, dtype=torch.uint8) if memory else torch.empty(0, device="cpu")
    return _of_type(tensor.untyped_storage(), torch.uint8)


def _of_type(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
        wrap_storage=storage, dtype=dtype, _internal=True
    )
