"""Collective operations of a gang's ranks. Without a gang, one process does them alone. Runs in every rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from flytekitplugins.daskpytorch import current_rank

T = TypeVar("T")


def sum_over_ranks(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Add up the ranks' tensors in place, and return the sum. Without a gang, return the tensor unchanged."""
    if current_rank().world_size > 1:
        dist.all_reduce(tensor, group=group)
    return tensor


def check_seen_once(times_seen: Tensor, kind: str) -> None:
    """Check that the ranks together have seen each sample exactly once.

    Args:
        times_seen: Number of times that all ranks together saw each sample.
        kind: Kind of the samples, for the error.

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
    """Return the objects of all ranks, in the order of ranks. Works with gloo and NCCL."""
    ranks = [own] * current_rank().world_size
    if len(ranks) > 1:
        dist.all_gather_object(ranks, own)
    return ranks


def generators() -> dict[str, Tensor]:
    """Return the states of this process's global random generators that the training uses."""
    states = {"cpu": torch.get_rng_state()}
    if current_rank().device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_generators(states: Mapping[str, Tensor]) -> None:
    """Restore the states that `generators` returned. Without a GPU, the state of a GPU's generator is ignored."""
    torch.set_rng_state(states["cpu"])
    if current_rank().device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
