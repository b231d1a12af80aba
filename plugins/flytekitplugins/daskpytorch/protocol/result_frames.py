"""Pieces of submitted results and return values, from a rank through its agent to the driver.

Ranks and the driver run this code. Agents only relay the pieces.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer


PIECE_SIZE = 1 << 20
"""Bytes of a piece. An agent relays a piece in milliseconds, which delays other ranks and heartbeats only briefly."""
SMALL_SIZE = 1 << 16
"""Maximum number of bytes of a pickled return value that travels within `reports.Returned`, without pieces."""


@dataclass(frozen=True)
class Piece:
    """A part of a result. A rank's pieces arrive in order, one result after the other."""

    key: str
    """Key of the handler that submits the result. Empty for a return value."""
    path: str | None
    """Path of the result's file, below the prefix. None for a return value."""
    data: bytes
    is_first: bool
    is_last: bool
    file: tuple[str, list[tuple[int, int]]] | None = None
    """Path of a file with the whole result instead of `data`, and the segments of the file (see `segments`)."""


def cut(key: str, path: str, data: bytes) -> Iterator[Piece]:
    """Yield the pieces of a result. An empty result has one empty piece."""
    for start in range(0, max(1, len(data)), PIECE_SIZE):
        end = start + PIECE_SIZE
        yield Piece(key, path, data[start:end], start == 0, end >= len(data))


class Writer:
    """File object that sends a pickled return value in pieces while pickle writes to it."""

    def __init__(self, send: Callable[[Piece], object]) -> None:
        self._send = send
        self._buffer = bytearray()
        self._is_first = True

    def write(self, data: ReadableBuffer) -> int:
        """Buffer some bytes, and send each full piece."""
        rest = memoryview(data).cast("B")
        size = len(rest)
        while rest:
            room = PIECE_SIZE - len(self._buffer)
            self._buffer += rest[:room]
            rest = rest[room:]
            if len(self._buffer) == PIECE_SIZE:
                self._send_piece(is_last=False)
        return size

    def close(self) -> bytes | None:
        """Send the last piece, and return None. A small value without earlier pieces is returned instead."""
        if self._is_first and len(self._buffer) <= SMALL_SIZE:
            return bytes(self._buffer)
        self._send_piece(is_last=True)
        return None

    def _send_piece(self, *, is_last: bool) -> None:
        self._send(Piece("", None, bytes(self._buffer), self._is_first, is_last))
        self._buffer.clear()
        self._is_first = False


class Reader(io.RawIOBase):
    """File object that reads a result from its pieces, one piece in memory at a time."""

    def __init__(self, pieces: Iterator[bytes] | Iterator[memoryview]) -> None:
        super().__init__()
        self._pieces = pieces
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        """Return True, as `io.BufferedReader` demands."""
        return True

    def readinto(self, into: WriteableBuffer) -> int:
        """Fill a buffer with the next bytes, and return their number. Return 0 at the end."""
        if not self._rest:
            self._rest = memoryview(next(self._pieces, b""))
        target = memoryview(into)
        size = min(len(target), len(self._rest))
        target[:size], self._rest = self._rest[:size], self._rest[size:]
        return size
