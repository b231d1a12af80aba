"""What a rank submits or returns, in pieces: rank -> agent -> driver. Runs in both ends; agents only relay."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer


PIECE_SIZE = 1 << 20
"""Bytes per piece: an agent is done with one in milliseconds, and then sees to its other ranks and its heartbeat."""
SMALL_SIZE = 1 << 16
"""Bytes of a return value up to which it needs no pieces, and goes with the report that it is there."""


@dataclass(frozen=True)
class Piece:
    """A part of a result; those of one rank come in order, and no other result of that rank between them."""

    key: str
    """Of the handler that submits it."""
    path: str | None
    """Where the result is to be written, below the prefix; None of what the rank's function has returned."""
    data: bytes
    is_first: bool
    is_last: bool
    file: tuple[str, list[tuple[int, int]]] | None = None
    """The name of a file that has all of the result instead, and the parts in the file; see `segments`."""


def cut(key: str, path: str, data: bytes) -> Iterator[Piece]:
    """The pieces of a result, also of an empty one."""
    for start in range(0, max(1, len(data)), PIECE_SIZE):
        end = start + PIECE_SIZE
        yield Piece(key, path, data[start:end], start == 0, end >= len(data))


class Writer:
    """A file for a return value, which is on its way before it is complete, unless it is small."""

    def __init__(self, send: Callable[[Piece], object]) -> None:
        self._send = send
        self._buffer = bytearray()
        self._is_first = True

    def write(self, data: ReadableBuffer) -> int:
        """Take some more."""
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
        """That was all; what is small, or None where it went in pieces."""
        if self._is_first and len(self._buffer) <= SMALL_SIZE:
            return bytes(self._buffer)
        self._send_piece(is_last=True)
        return None

    def _send_piece(self, *, is_last: bool) -> None:
        self._send(Piece("", None, bytes(self._buffer), self._is_first, is_last))
        self._buffer.clear()
        self._is_first = False


class Reader(io.RawIOBase):
    """What was written, from its pieces; one of them is in memory at a time."""

    def __init__(self, pieces: Iterator[bytes] | Iterator[memoryview]) -> None:
        super().__init__()
        self._pieces = pieces
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, into: WriteableBuffer) -> int:
        """Give some more; 0 bytes at the end."""
        if not self._rest:
            self._rest = memoryview(next(self._pieces, b""))
        target = memoryview(into)
        size = min(len(target), len(self._rest))
        target[:size], self._rest = self._rest[:size], self._rest[size:]
        return size
