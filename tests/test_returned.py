"""Return values are made ready for a driver without the rank's GPU and process group."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flytekitplugins.daskpytorch.rank.returned import pickled, unwrapped


class Elsewhere:
    """What a tensor of a GPU does; there is none where this runs."""

    is_cuda = True

    def cpu(self) -> torch.Tensor:
        return self.detach().clone()  # type: ignore[attr-defined]


class ParameterElsewhere(Elsewhere, nn.Parameter):
    """A parameter on a GPU."""


class Trained(NamedTuple):
    model: nn.Module
    loss: float


@pytest.fixture
def wrapped() -> Iterator[DistributedDataParallel]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DistributedDataParallel(nn.Linear(2, 1))
    dist.destroy_process_group()


def returned(value: Any) -> Any:
    """Return the value as the driver has it."""
    data, *aside = pickled(value)
    return pickle.loads(data, buffers=aside)


def test_a_parameter_of_a_gpu_stays_a_parameter() -> None:
    made = returned({"weight": ParameterElsewhere(torch.ones(2)), "frozen": nn.Parameter(torch.ones(2), False)})
    assert [(type(each), each.requires_grad) for each in made.values()] == [(nn.Parameter, True), (nn.Parameter, False)]
    nn.Linear(2, 1).bias = made["weight"]  # a plain tensor is refused there


def test_wherever_a_wrapped_model_is_its_own_module_is_returned(wrapped: DistributedDataParallel) -> None:
    for value in ([wrapped], {"model": wrapped}, (wrapped, 0.5), Trained(wrapped, 0.5)):
        for made in (unwrapped(value), returned(value)):
            model = made["model"] if isinstance(made, dict) else made[0]
            assert (type(made), type(model)) == (type(value), nn.Linear)
            assert torch.equal(model.weight, wrapped.module.weight)
    assert type(returned(SimpleNamespace(model=wrapped)).model) is nn.Linear


def test_other_values_are_returned_as_they_are() -> None:
    value = [nn.Linear(2, 1), {"a": 1}, "text"]
    assert unwrapped(value) == value
