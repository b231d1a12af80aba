"""Large arguments lie once in shared memory, and arrive unchanged."""

from __future__ import annotations

import mmap
import os
import resource
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from flytekitplugins.daskpytorch.driver.request import request_for
from flytekitplugins.daskpytorch.protocol import code
from flytekitplugins.daskpytorch.protocol.payload import Address, SharedMemory
from flytekitplugins.daskpytorch.protocol.pickling import LARGE
from flytekitplugins.daskpytorch.settings import Gang
from processes import ends


def take(*args: object, **kwargs: object) -> None:
    """What is called."""


def packed(*args: object, **kwargs: object) -> tuple[bytes, SharedMemory]:
    memory = SharedMemory()
    return code.pack_call(take, args, kwargs, memory.add), memory


def unpacked(data: bytes, memory: SharedMemory) -> code.Call:
    return code.unpack_call(data, memory.address.mapped())


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


def test_what_is_small_is_in_the_pickle_and_a_small_tensor_can_grow() -> None:
    data, memory = packed(np.ones(3), torch.ones(3), "text")
    assert memory.address.segments == ()
    call = code.unpack_call(data)
    assert call.args[1].resize_(5).shape == (5,)


def test_a_large_pickle_stands_there_too() -> None:
    rows = [f"row {index}" for index in range(100_000)]
    data, memory = packed(rows, np.zeros(LARGE, dtype=np.uint8))
    assert data == b""
    assert len(memory.address.segments) == 2
    assert unpacked(data, memory).args[0] == rows


def test_each_segment_has_pages_of_its_own() -> None:
    memory = SharedMemory()
    for data in (b"one", b"two", b"x" * 5000, b"four"):
        memory.add(data)
    address = memory.address
    assert [bytes(segment) for segment in address.mapped()] == [b"one", b"two", b"x" * 5000, b"four"]
    assert [start / mmap.PAGESIZE for start, _ in address.segments] == [0, 1, 2, 4]


def come(original: SharedMemory, announced: Address) -> SharedMemory:
    """What comes by a connection, at whose other end all of the original is sent."""
    mine, theirs = ends()

    def send() -> None:
        theirs.send_file(original.address.path)
        theirs.close()

    sending = threading.Thread(target=send)
    sending.start()
    try:
        return SharedMemory.received(mine, announced)
    finally:
        sending.join()
        mine.close()


def test_it_comes_by_a_connection_whole_or_not_at_all() -> None:
    original = SharedMemory()
    for data in (b"one", bytes(range(256)) * 10_000):
        original.add(data)
    copy = come(original, original.address)
    assert copy.address.path != original.address.path
    assert [bytes(segment) for segment in copy.address.mapped()] == [b"one", bytes(range(256)) * 10_000]
    with pytest.raises(EOFError, match="with 1 of their bytes missing"):
        come(original, replace(original.address, segments=((0, original.address.size + 1),)))


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
    data = np.zeros(1 << 20)
    request = request_for(take, (data,), {}, Gang())
    assert request.large is not None
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2, 2))
    request = request_for(take, (data,), {}, Gang())
    assert request.large is None
    assert len(request.call) > data.nbytes
