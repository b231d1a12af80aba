"""What a rank submits, as it travels: in pieces, rank -> agent -> driver. Runs in both ends; agents only relay."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Piece", "is_piece", "pack", "unpack"]

PIECE_SIZE = 1 << 20
"""Bytes per piece: an agent is done with one in milliseconds, and then sees to its other ranks and its heartbeat."""
MARK = b"piece:"
"""Begins the report that holds a piece, as no pickle does: it is known for one before it is opened."""


@dataclass(frozen=True)
class Piece:
    """A part of a result; those of one rank come in order, and no other result of that rank between them."""

    key: str
    """Of the handler that submits it."""
    path: str
    """Where the result is to be written, below the prefix."""
    data: bytes
    is_first: bool
    is_last: bool


def pack(key: str, path: str, data: bytes) -> Iterator[bytes]:
    """The reports that carry a result, also an empty one."""
    for start in range(0, max(1, len(data)), PIECE_SIZE):
        end = start + PIECE_SIZE
        yield MARK + pickle.dumps(Piece(key, path, data[start:end], start == 0, end >= len(data)))


def is_piece(report: bytes) -> bool:
    """Whether a rank's report is a part of a result."""
    return report.startswith(MARK)


def unpack(report: bytes) -> Piece:
    """What `pack` made."""
    # From our own rank, by its agent's connection.
    piece: Piece = pickle.loads(memoryview(report)[len(MARK) :])  # noqa: S301
    return piece
