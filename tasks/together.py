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


def check_seen_once(times_seen: Tensor, kind: str) -> None:
    """Refuse samples that the ranks together have not seen exactly once.

    Args:
        times_seen: For each sample how often all ranks together have seen it.
        kind: Samples of what kind.

    Raises:
        RuntimeError: A sample was seen more than once, or not at all.
    """
    if not bool((times_seen == 1).all()):
        raise RuntimeError(
            f"the ranks saw {int((times_seen == 0).sum())} of {len(times_seen)} {kind} not at all and "
            f"{int((times_seen > 1).sum())} more than once, but each must be seen once. The likely cause is that "
            "the ranks were given different data or seeds; give all of them the same."
        )


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
