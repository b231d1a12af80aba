"""An agent's sign of life, each second or so, with those of all its ranks: a frame that needs no unpickling.

A driver of thousands of agents hears thousands of them a second. That one has come is all that most of them say.
"""

import struct
from collections.abc import Iterator, Mapping

MARK = b"\0"
"""How it begins, and no pickle does."""
RANK = struct.Struct("!IQ")
"""A rank, and how many signs of life it has given so far."""


def packed(num_moves: Mapping[int, int]) -> bytes:
    """The frame of an agent whose ranks have given so many signs of life; those that it has not heard of are left out.

    Examples:
        >>> from flytekitplugins.daskpytorch.protocol import heartbeat
        >>> frame = heartbeat.packed({8: 120, 9: 119})
        >>> heartbeat.is_heartbeat(frame), dict(heartbeat.unpacked(frame))
        (True, {8: 120, 9: 119})
    """
    return MARK + b"".join(RANK.pack(*each) for each in num_moves.items())


def is_heartbeat(frame: bytes) -> bool:
    """Whether this frame is one, and not a message."""
    return frame[:1] == MARK


def unpacked(frame: bytes) -> Iterator[tuple[int, int]]:
    """Each rank of which the frame tells, and its signs of life so far."""
    return RANK.iter_unpack(memoryview(frame)[1:])
