"""Each rank gets its own GPU. The GPUs are simulated."""

from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from flytekitplugins.daskpytorch.context import RankContext
from flytekitplugins.daskpytorch.protocol.placement import Node, place_ranks
from flytekitplugins.daskpytorch.rank import main

NODE = Node(worker="w", host="h", num_cores=8, gpus=("2", "3"), gpu_names=(), interface=None, versions={})


@pytest.fixture
def made_current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The GPUs that were made current."""
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    return current


@pytest.mark.parametrize(
    ("devices", "backend", "taken", "current"),
    [
        ("own", "nccl", "cuda:0", [0]),
        ("all", "nccl", "cuda:1", [1]),
        ("own", "gloo", None, []),  # what is current anyway
        ("all", "gloo", None, [1]),
    ],
)
def test_the_ranks_own_gpu_is_the_current_one(
    devices: Literal["own", "all"], backend: str, taken: str | None, current: list[int], made_current: list[int]
) -> None:
    [[_, place]] = place_ranks([NODE], 2, devices)
    order: Any = SimpleNamespace(place=place, job=SimpleNamespace(backend=backend))
    device = main._take_device(order)
    assert (device and str(device), made_current) == (taken, current)


def test_a_rank_without_a_gpu_leaves_cuda_alone(made_current: list[int]) -> None:
    [[place]] = place_ranks([Node(**vars(NODE) | {"gpus": ()})], 1, "all")
    order: Any = SimpleNamespace(place=place, job=SimpleNamespace(backend="gloo"))
    assert main._take_device(order) is None
    assert not made_current


def test_the_context_names_the_ranks_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert RankContext(device_index=1).device == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert RankContext(device_index=1).device == torch.device("cuda:1")
