"""An agent's heartbeat: small, and never taken for a message."""

from __future__ import annotations

import pickle

import pytest

from flytekitplugins.daskpytorch.protocol import heartbeat
from flytekitplugins.daskpytorch.protocol.messages import Leaving, Lines


@pytest.mark.parametrize("num_moves", [{}, {0: 0}, {7: 1 << 40, 8: 3}, {rank: rank for rank in range(8)}])
def test_it_arrives_as_it_was_sent(num_moves: dict[int, int]) -> None:
    frame = heartbeat.packed(num_moves)
    assert heartbeat.is_heartbeat(frame)
    assert dict(heartbeat.unpacked(frame)) == num_moves


def test_that_of_eight_ranks_takes_a_hundred_bytes() -> None:
    assert len(heartbeat.packed(dict.fromkeys(range(8), 1 << 40))) < 100


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_no_message_is_taken_for_one(protocol: int) -> None:
    for message in (Leaving(), Lines(0, ["x"])):
        assert not heartbeat.is_heartbeat(pickle.dumps(message, protocol))
