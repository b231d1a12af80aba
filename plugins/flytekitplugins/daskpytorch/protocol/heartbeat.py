"""An agent's heartbeat, about every second: a frame with its ranks' signs of life that needs no unpickling.

The driver of thousands of agents receives thousands of heartbeats a second. Most heartbeats bring no new numbers: only
their arrival matters.
"""

import struct
from collections.abc import Iterator, Mapping

MARK = b"\0"
"""First byte of a heartbeat. No pickle begins with this byte."""
RANK = struct.Struct("!IQ")
"""A rank, and its number of signs of life so far."""


def packed(num_moves: Mapping[int, int]) -> bytes:
    """Return an agent's heartbeat.

    Args:
        num_moves: Rank -> number of signs of life so far. Ranks without a report so far are left out.

    Examples:
        >>> from flytekitplugins.daskpytorch.protocol import heartbeat
        >>> frame = heartbeat.packed({8: 120, 9: 119})
        >>> heartbeat.is_heartbeat(frame), dict(heartbeat.unpacked(frame))
        (True, {8: 120, 9: 119})
    """
    return MARK + b"".join(RANK.pack(*each) for each in num_moves.items())


def is_heartbeat(frame: bytes) -> bool:
    """Return True for a heartbeat, False for a message."""
    return frame[:1] == MARK


def unpacked(frame: bytes) -> Iterator[tuple[int, int]]:
    """Yield each rank in a heartbeat, with its number of signs of life so far."""
    return RANK.iter_unpack(memoryview(frame)[1:])
