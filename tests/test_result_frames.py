"""Return values in frames: small ones whole, large ones in pieces, with equal bytes at the end."""

from __future__ import annotations

import io
import os

import pytest

from flytekitplugins.daskpytorch.protocol.payload import (
    PIECE_SIZE,
    SMALL_SIZE,
    Piece,
    Reader,
    Writer,
)


def written(data: bytes, step: int) -> tuple[bytes | None, list[Piece]]:
    """What becomes of some bytes that are written in steps."""
    pieces: list[Piece] = []
    writer = Writer(pieces.append)
    for start in range(0, len(data), step):
        writer.write(memoryview(data)[start : start + step])
    return writer.close(), pieces


@pytest.mark.parametrize("size", [0, 1, SMALL_SIZE])
def test_a_small_value_needs_no_pieces(size: int) -> None:
    data = os.urandom(size)
    assert written(data, 1 << 12) == (data, [])


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
