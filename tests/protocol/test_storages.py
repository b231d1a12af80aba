"""Tensors of all kinds are pickled unchanged, and without copies of their memory."""

import io
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

from flytekitplugins.daskpytorch.protocol.torch_parts import reduce_storage


class Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        return reduce_storage(obj, 0) or super().reducer_override(obj)


def through(value: Any) -> Any:
    file = io.BytesIO()
    Pickler(file, protocol=5).dump(value)
    return pickle.loads(file.getvalue())


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(1000, 7),
        lambda: torch.randn(5, 4, dtype=torch.float64).t(),
        lambda: torch.arange(10)[3:7],
        lambda: torch.randn(8).to(torch.bfloat16),
        lambda: torch.randn(8, dtype=torch.complex64).conj(),
        lambda: torch.tensor([True, False]),
        lambda: torch.tensor(3),
        lambda: torch.tensor([1, 2], dtype=torch.uint16),
        lambda: torch.empty(0, 3),
        lambda: torch.eye(4).to_sparse(),
        lambda: torch.randn(3, requires_grad=True),
        lambda: nn.Parameter(torch.randn(3)),
        lambda: torch.randn(3).share_memory_(),
    ],
)
def test_a_tensor_arrives_as_it_was(make: Callable[[], torch.Tensor]) -> None:
    sent = make()
    got = through(sent)
    assert torch.equal(got.coalesce().to_dense() if got.is_sparse else got, sent.to_dense() if sent.is_sparse else sent)
    assert (type(got), got.dtype, got.stride() if not got.is_sparse else None, got.requires_grad) == (
        type(sent),
        sent.dtype,
        sent.stride() if not sent.is_sparse else None,
        sent.requires_grad,
    )


def test_tensors_that_share_memory_share_it_afterwards_and_it_travels_once() -> None:
    whole = torch.zeros(1 << 16)
    file = io.BytesIO()
    Pickler(file, protocol=5).dump([whole, whole[10:], whole.view(2, -1)])
    assert len(file.getvalue()) < 1.1 * whole.nbytes
    got = pickle.loads(file.getvalue())
    got[0][10] = 7
    assert (got[1][0], got[2][0, 10]) == (7, 7)
