"""Large arguments, results and return values: all come out as they went in."""

import os
import pickle
import string
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flytekitplugins.daskpytorch.driver.received import ReceivedResults
from flytekitplugins.daskpytorch.protocol.function import pack_call, unpack_call
from flytekitplugins.daskpytorch.protocol.job import LARGE
from flytekitplugins.daskpytorch.protocol.messages import PIECE_SIZE, Piece, PieceWriter
from flytekitplugins.daskpytorch.rank.link import dump_returned, unwrapped
from gangs import pieces_of

# ---- A call's arguments


def test_a_small_tensor_can_grow() -> None:
    assert unpack_call(pack_call(print, (torch.ones(3),), {})).args[0].resize_(5).shape == (5,)


# ---- Return values


def sent(value: Any) -> list[Piece]:
    """Larger ones than a message has."""
    pieces: list[Piece] = []
    writer = PieceWriter(None, pieces.append)
    dump_returned(value, writer)
    writer._put(memoryview(writer._rest), is_last=True)
    return pieces


def received(pieces: list[Piece]) -> Any:
    results = ReceivedResults()
    add(results, 0, pieces)
    return results.take_returned(0, None)()


PARTS = st.one_of(
    st.integers(),
    st.text(string.ascii_letters, max_size=20),
    st.sampled_from([10, LARGE, LARGE + 1, 3 * PIECE_SIZE + 5]).map(lambda size: b"b" * size),
    st.sampled_from([0, 10, LARGE - 1, LARGE, LARGE + 1, 3 * LARGE]).map(lambda size: np.arange(size, dtype=np.uint8)),
)


@settings(max_examples=40)
@given(value=st.lists(PARTS, max_size=8))
def test_any_mixture_comes_back_as_it_was(value: list[Any]) -> None:
    pieces = sent(value)
    assert [piece.is_last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all(piece.path is None and len(piece.data) <= PIECE_SIZE for piece in pieces)
    found = received(pieces)
    assert [type(part) for part in found] == [type(part) for part in value]
    assert all(np.array_equal(here, there) for here, there in zip(found, value, strict=True))
    assert all(part.flags.writeable for part in found if isinstance(part, np.ndarray))


# ---- What the driver has of them


BIG = 3 * PIECE_SIZE


def add(received: ReceivedResults, rank: int, pieces: list[Piece]) -> None:
    for piece in pieces:
        received.add(received.keep(rank, piece))


def test_each_rank_gets_its_own() -> None:
    received, data = ReceivedResults(), [os.urandom(BIG) for _ in range(2)]
    for pieces in zip(*map(sent, data), strict=True):  # the ranks' pieces mix
        for rank, piece in enumerate(pieces):
            add(received, rank, [piece])
    assert received.is_empty  # nobody's submission
    assert [received.take_returned(rank, None)() for rank in (1, 0)] == [data[1], data[0]]
    assert received.take_returned(2, pickle.dumps(b"small"))() == b"small"


def test_what_an_older_attempt_returned_does_not_count() -> None:
    received, submission = ReceivedResults(), pieces_of("a", b"x" * BIG)
    files: list[tuple[int, str, bytes]] = []
    add(received, 0, sent(b"o" * BIG))  # whole; another rank failed then
    add(received, 1, sent(b"o" * BIG))
    add(received, 2, sent(b"o" * BIG)[:2])  # cut short
    add(received, 0, sent(b"n" * BIG))
    add(received, 2, submission)
    add(received, 2, sent(b"n" * BIG))
    assert received.take_returned(0, None)() == b"n" * BIG
    assert received.take_returned(1, pickle.dumps(b"of the newest attempt"))() == b"of the newest attempt"
    assert received.take_returned(2, None)() == b"n" * BIG
    received.write_files(lambda *written: files.append((*written[:2], written[2].read_bytes())))
    assert files == [(2, "a", b"x" * BIG)]


# ---- Made ready for a driver without the rank's GPU and process group


class Elsewhere:
    """Stand-in for a tensor of a GPU: this machine may have none."""

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


def test_a_parameter_of_a_gpu_stays_a_parameter() -> None:
    made = received(sent({"weight": ParameterElsewhere(torch.ones(2)), "frozen": nn.Parameter(torch.ones(2), False)}))
    assert [(type(each), each.requires_grad) for each in made.values()] == [(nn.Parameter, True), (nn.Parameter, False)]
    nn.Linear(2, 1).bias = made["weight"]  # a plain tensor is refused there


def test_wherever_a_wrapped_model_is_its_own_module_is_returned(wrapped: DistributedDataParallel) -> None:
    for value in ([wrapped], {"model": wrapped}, (wrapped, 0.5), Trained(wrapped, 0.5)):
        for made in (unwrapped(value), received(sent(value))):
            model = made["model"] if isinstance(made, dict) else made[0]
            assert (type(made), type(model)) == (type(value), nn.Linear)
            assert torch.equal(model.weight, wrapped.module.weight)
    assert type(received(sent(SimpleNamespace(model=wrapped))).model) is nn.Linear


def test_other_values_are_returned_as_they_are() -> None:
    value = [nn.Linear(2, 1), {"a": 1}, "text"]
    assert unwrapped(value) == value
