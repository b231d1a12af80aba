"""What the ranks of a gang do together; outside a gang, what one process does alone. Runs in every rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from flytekitplugins.daskpytorch import current_rank

T = TypeVar("T")


def sum_over_ranks(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Add up the ranks' tensors, in place; outside a gang the tensor as it is."""
    if current_rank().world_size > 1:
        dist.all_reduce(tensor, group=group)
    return tensor


def gather_from_ranks(own: T) -> list[T]:
    """What each rank has to tell, in the order of ranks; over gloo and NCCL alike."""
    ranks = [own] * current_rank().world_size
    if len(ranks) > 1:
        dist.all_gather_object(ranks, own)
    return ranks


def generators() -> dict[str, Tensor]:
    """The states of this process's global random generators that the training draws from."""
    states = {"cpu": torch.get_rng_state()}
    if current_rank().device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_generators(states: Mapping[str, Tensor]) -> None:
    """Put back what `generators` gave; without a GPU, the state of one is of no use."""
    torch.set_rng_state(states["cpu"])
    if current_rank().device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
