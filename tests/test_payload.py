"""Large arguments, results and return values: in memory, files or pieces, all come out as they went in."""

from __future__ import annotations

import io
import os
import pickle
import resource
import string
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO, Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flytekitplugins.daskpytorch.driver import request
from flytekitplugins.daskpytorch.protocol.function import Call, unpack_call
from flytekitplugins.daskpytorch.protocol.payload import (
    PIECE_SIZE,
    SMALL_SIZE,
    MappedReturn,
    Piece,
    Reader,
    Segments,
    SharedMemory,
    Writer,
    send_by_file,
)
from flytekitplugins.daskpytorch.protocol.pickling import LARGE
from flytekitplugins.daskpytorch.settings import Gang

# ---- A call's arguments in shared memory


def take(*args: object, **kwargs: object) -> None:
    """What is called."""


def packed(*args: object, **kwargs: object) -> tuple[bytes, SharedMemory]:
    data, memory = request.packed(take, args, kwargs)
    assert memory is not None
    return data, memory


def unpacked(data: bytes, memory: SharedMemory) -> Call:
    return unpack_call(data, memory.address.mapped())


def test_arrays_and_tensors_come_out_as_they_went_in_and_lie_in_the_memory() -> None:
    array, tensor = np.arange(LARGE, dtype=np.int16), torch.arange(LARGE, dtype=torch.uint8)
    data, memory = packed(array, columns=np.asfortranarray(array.reshape(2, -1)), tensors=[tensor, tensor[5:]])
    call = unpacked(data, memory)
    assert len(data) < 10_000
    assert [size for _, size in memory.address.segments] == [2 * LARGE, 2 * LARGE, LARGE]
    assert np.array_equal(call.args[0], array)
    assert np.array_equal(call.kwargs["columns"], array.reshape(2, -1))
    whole, part = call.kwargs["tensors"]
    assert torch.equal(whole, tensor)
    part[0] = 77
    assert whole[5] == 77  # they share their memory, as they did


def test_what_one_writes_into_an_argument_nobody_else_sees() -> None:
    array = np.zeros(LARGE, dtype=np.uint8)
    data, memory = packed(array, torch.from_numpy(array))
    first, second = unpacked(data, memory), unpacked(data, memory)
    for argument in first.args:
        argument[:] = 1
    assert not array.any()
    assert not any(argument.any() for argument in second.args)
    assert all(argument.all() for argument in first.args)


def test_an_array_that_may_not_be_written_to_may_not_there() -> None:
    array = np.zeros(LARGE, dtype=np.uint8)
    array.flags.writeable = False
    [argument] = unpacked(*packed(array)).args
    assert not argument.flags.writeable


def test_what_is_small_is_in_the_pickle_and_a_small_tensor_can_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "memfd_create", mock.Mock(side_effect=AssertionError("a small call needs no file")))
    data, memory = request.packed(take, (np.ones(3), torch.ones(3), "text"), {})
    assert memory is None
    call = unpack_call(data)
    assert call.args[1].resize_(5).shape == (5,)


def test_a_large_pickle_stands_there_too() -> None:
    rows = [f"row {index}" for index in range(100_000)]
    data, memory = packed(rows, np.zeros(LARGE, dtype=np.uint8))
    assert data == b""
    assert len(memory.address.segments) == 2
    assert unpacked(data, memory).args[0] == rows


def test_it_is_found_by_its_name_alone_and_goes_with_its_keeper() -> None:
    memory = SharedMemory()
    memory.add(b"data")
    address = memory.address
    assert address.is_here
    assert not replace(address, name="another").is_here
    assert not replace(address, pid=os.getppid()).is_here
    [data] = address.mapped()
    memory.close()
    assert not address.is_here
    assert data == b"data"  # mapped before


def test_calls_that_wait_leave_half_of_the_files_that_may_be_open_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    data, tensor = np.arange(1 << 20), torch.arange(1 << 20)
    assert request.request_for(take, (data,), {}, Gang()).large is not None
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2, 2))
    asked = request.request_for(take, (data, tensor), {}, Gang())
    assert asked.large is None
    found, other = unpack_call(asked.call or b"").args
    assert np.array_equal(found, data)
    assert torch.equal(other, tensor)


# ---- Return values in a file


def sent(folder: Path, value: Any) -> tuple[bytes | None, list[Piece]]:
    """Return what a rank reports for a value: a small report or None, and the pieces."""
    pieces: list[Piece] = []

    def dump(file: IO[bytes], takes: Callable[[pickle.PickleBuffer], bool]) -> None:
        pickle.Pickler(file, protocol=5, buffer_callback=takes).dump(value)

    return send_by_file(dump, folder, pieces.append), pieces


def received(piece: Piece) -> MappedReturn:
    assert piece.file is not None
    return MappedReturn(*piece.file)


PARTS = st.one_of(
    st.integers(),
    st.text(string.ascii_letters, max_size=20),
    st.sampled_from([SMALL_SIZE - 100, SMALL_SIZE, 3 * SMALL_SIZE, LARGE, LARGE + 1]).map(lambda size: b"b" * size),
    st.sampled_from([0, 10, LARGE - 1, LARGE, LARGE + 1]).map(lambda size: np.arange(size, dtype=np.uint8)),
)


@settings(max_examples=60)
@given(st.lists(PARTS, max_size=8))
def test_any_mixture_comes_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, value: list[Any]) -> None:
    folder = tmp_path_factory.mktemp("driver")
    small, pieces = sent(folder, value)
    found = pickle.loads(small) if small is not None else received(pieces[0]).load()
    assert [type(part) for part in found] == [type(part) for part in value]
    assert all(np.array_equal(here, there) for here, there in zip(found, value, strict=True))
    assert list(folder.iterdir()) == []


def test_what_is_small_makes_no_file(tmp_path: Path) -> None:
    small, pieces = sent(tmp_path, b"s" * (SMALL_SIZE - 100))
    assert (pickle.loads(small or b""), pieces) == (b"s" * (SMALL_SIZE - 100), [])


def test_an_array_is_the_files_memory_at_the_start_of_a_page_and_may_be_written_to(tmp_path: Path) -> None:
    value = ["before", np.ones(LARGE, dtype=np.uint8), b"between" * SMALL_SIZE, np.zeros(LARGE, dtype=np.uint8)]
    _, [piece] = sent(tmp_path, value)
    file = received(piece)
    _, ones, _, zeros = file.load()
    for array, memory in zip((ones, zeros), file.aside, strict=True):
        assert np.shares_memory(array, np.frombuffer(memory, dtype=np.uint8))
        assert array.ctypes.data % 4096 == 0
        array[0] = 7
    assert (ones[:2].tolist(), zeros[:2].tolist()) == ([7, 1], [7, 0])


def test_what_is_given_up_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Segments, "add", mock.Mock(side_effect=OSError("no space left on device")))
    with pytest.raises(OSError, match="no space left"):
        sent(tmp_path, b"x" * LARGE)
    assert list(tmp_path.iterdir()) == []


# ---- Return values in pieces


def written(data: bytes, step: int) -> tuple[bytes | None, list[Piece]]:
    """Write bytes in steps. Return the report or None, and the pieces that were sent."""
    pieces: list[Piece] = []
    writer = Writer(pieces.append)
    for start in range(0, len(data), step):
        writer.write(memoryview(data)[start : start + step])
    return writer.close(), pieces


@pytest.mark.parametrize("step", [1 << 12, PIECE_SIZE, 5 * PIECE_SIZE])
@pytest.mark.parametrize("size", [SMALL_SIZE + 1, PIECE_SIZE - 1, PIECE_SIZE, PIECE_SIZE + 1, 3 * PIECE_SIZE + 5])
def test_a_large_value_goes_in_pieces_and_is_read_as_it_was_written(size: int, step: int) -> None:
    data = os.urandom(size)
    small, pieces = written(data, step)
    assert small is None
    assert [piece.is_first for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [piece.is_last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all(piece.path is None and len(piece.data) <= PIECE_SIZE for piece in pieces)
    with io.BufferedReader(Reader(piece.data for piece in pieces)) as file:
        assert file.read(10) == data[:10]
        rest = bytearray(size)
        assert file.readinto(rest) == size - 10
        assert rest[: size - 10] == data[10:]
        assert file.read() == b""
