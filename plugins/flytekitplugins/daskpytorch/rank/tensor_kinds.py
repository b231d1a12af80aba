"""Finds tensors that a sharded checkpoint cannot save or fill, and names a replacement. Runs in a rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.serialization import get_safe_globals

META = (
    "is a tensor on the meta device, which holds no values. Give it values first: module.to_empty(device=...), then "
    "its initialisation or load_state_dict"
)
PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class TensorKindError(TypeError):
    """A state has a tensor that a checkpoint cannot save or fill. The message names a replacement."""


def check_savable(state: Mapping[str, Any]) -> None:
    """Check that a checkpoint can save all tensors of a flattened state, also those inside a `DTensor`.

    Raises:
        TensorKindError: A later load could not read one of the tensors.
    """
    for key, tensor in _parts(state):
        if (reason := META if tensor.is_meta and not is_lazy(tensor) else _strange(tensor)) is not None:
            raise TensorKindError(f"{key} of the state to be saved {reason}.")


def check_fillable(state: Mapping[str, Any]) -> None:
    """Check that a checkpoint can be loaded into all tensors of a flattened state.

    Raises:
        TensorKindError: A load cannot write to one of the tensors.
    """
    for key, tensor in _parts(state):
        if (reason := _strange(tensor) or _shared(tensor)) is not None:
            raise TensorKindError(f"{key} of the state to be loaded into {reason}.")


def _parts(state: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the key and this rank's part of each tensor."""
    for key, value in state.items():
        parts: Iterable[torch.Tensor] = [value] if isinstance(value, torch.Tensor) else []
        if hasattr(value, "local_shards"):  # FSDP1's ShardedTensor
            parts = [shard.tensor for shard in value.local_shards()]
        elif hasattr(value, "to_local"):  # a DTensor
            with torch.no_grad():
                parts = [value.to_local()]
        yield from ((key, part) for part in parts)


def _strange(tensor: torch.Tensor) -> str | None:
    if is_lazy(tensor):
        return "belongs to a lazy module and has no shape yet. Call the module once before"
    if tensor.is_nested:
        return "is a nested tensor. Put the list value.unbind() in its place"
    if tensor.layout is not torch.strided:
        return f"is a tensor of layout {tensor.layout}. Put value.to_dense() in its place"
    if tensor.is_quantized:
        return "is a quantized tensor. Put value.int_repr() in its place, and the scale and zero point beside it"
    kind = type(tensor)
    if kind in PLAIN or kind in get_safe_globals() or _is_copied_as_plain(tensor):
        return None
    return (
        f"is a {kind.__module__}.{kind.__qualname__}, which torch.load(weights_only=True) does not read. Put the plain "
        "tensors that it is made of in its place, or allow its class on all ranks: torch.serialization.add_safe_globals"
    )


def _is_copied_as_plain(tensor: torch.Tensor) -> bool:
    """Return True for the unfinished result of a functional collective, which is saved as a plain tensor."""
    try:
        return type(torch.empty_like(tensor)) in PLAIN
    except Exception:  # a tensor class of another library may raise any error
        return False


def _shared(tensor: torch.Tensor) -> str | None:
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return "is an expanded tensor: its elements share one place in memory. Put value.clone() in its place"
    return None
