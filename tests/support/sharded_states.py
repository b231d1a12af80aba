"""What the tests of sharded checkpoints share: a model under FSDP2, its state, and who listens to a gang."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from flytekitplugins.daskpytorch import current_rank


def make(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model whose sizes no number of ranks divides."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 5))
    fully_shard(model, mesh=init_device_mesh("cpu", (current_rank().world_size,)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def whole(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All that a training goes on from, gathered and copied."""
    states = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    return flatten_state_dict(copy.deepcopy(dict(zip(("model", "optimizer"), states, strict=True))))[0]


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    assert len(one) > 20
    for key, value in one.items():
        same = value.equal(other[key]) if isinstance(value, torch.Tensor) else value == other[key]
        assert same, key
