"""Large calls, return values and submitted files, on their way between the driver and the ranks.

The first rank of a node that needs a large call downloads it to the agent's folder (`rank.transfers`).

Large return values and submitted files travel in pieces, which the driver writes to files.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass

PIECE_SIZE = 1 << 20
"""Bytes. An agent relays a piece in milliseconds, which delays other ranks and heartbeats only briefly."""
SMALL_SIZE = 1 << 16
LARGE = 1 << 20
"""Bytes from which ranks download a pickled call."""
CALL = "call"
"""Name by which ranks ask for the call."""


@dataclass(frozen=True)
class LargeCall:
    """Stands for a pickled call in orders."""

    number: int
    size: int


def in_order(call: bytes, number: int = 0) -> bytes | LargeCall:
    return LargeCall(number, len(call)) if len(call) >= LARGE else call


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A value's pieces arrive in order."""

    path: str | None
    """Path in the results' folder (empty if only the task's folder must exist), or None for a return value."""
    file: str
    """Name of the value's file in a folder of the driver."""
    start: int
    """Place of the data in the file."""
    data: bytes
    is_last: bool


class PieceWriter:
    """File that passes what is written to `send`, in pieces."""

    def __init__(self, path: str | None, send: Callable[[Piece], object]) -> None:
        self._path, self._send, self._name = path, send, uuid.uuid4().hex
        self._start = 0
        self._rest = bytearray()

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), PIECE_SIZE):
            part = view[start : start + PIECE_SIZE]
            if len(self._rest) + len(part) > PIECE_SIZE:
                self._flush(is_last=False)
            self._rest += part
        return len(view)

    def end(self) -> bytes | None:
        """Send the last piece, or return the bytes of a small return value."""
        if self._path is None and self._start == 0 and len(self._rest) <= SMALL_SIZE:
            return bytes(self._rest)
        self._flush(is_last=True)
        return None

    def _flush(self, *, is_last: bool) -> None:
        data = bytes(self._rest)
        self._send(Piece(path=self._path, file=self._name, start=self._start, data=data, is_last=is_last))
        self._start += len(data)
        self._rest.clear()
