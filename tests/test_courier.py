"""Checkpoints on their way to the vault."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection, Pipe

import pytest

from flytekitplugins.daskpytorch.driver.agents import Peer
from flytekitplugins.daskpytorch.driver.fetch import Courier
from flytekitplugins.daskpytorch.protocol.checkpoint_file import CheckpointFile
from flytekitplugins.daskpytorch.protocol.placement import Node


def checkpoint(step: int) -> CheckpointFile:
    return CheckpointFile(generation=0, step=step, size=1, digest=f"{step:064x}")


def an_agent() -> tuple[Peer, Connection]:
    mine, theirs = Pipe()
    node = Node(worker="w", host="h", num_cores=1, gpus=(), gpu_names=(), interface=None, versions={})
    return Peer(node, mine, time.monotonic()), theirs


@pytest.fixture
def agent() -> tuple[Peer, Connection]:
    return an_agent()


def asked_for(connection: Connection) -> list[int]:
    steps = []
    while connection.poll():
        steps.append(connection.recv().file.step)
    return steps


def test_one_at_a_time_and_the_newest_next(agent: tuple[Peer, Connection]) -> None:
    (peer, connection), courier = agent, Courier()
    for step in (1, 2, 3):
        courier.fetch(peer, checkpoint(step))
    assert asked_for(connection) == [1]
    courier.note_end(checkpoint(1))
    assert asked_for(connection) == [3]
    courier.note_end(checkpoint(3))
    assert not courier.is_busy


def test_the_end_of_another_one_changes_nothing(agent: tuple[Peer, Connection]) -> None:
    (peer, connection), courier = agent, Courier()
    courier.fetch(peer, checkpoint(1))
    courier.fetch(peer, checkpoint(2))
    courier.note_end(checkpoint(7))
    assert asked_for(connection) == [1]
    assert courier.is_busy


def test_what_a_lost_agent_was_to_bring_is_not_waited_for(agent: tuple[Peer, Connection]) -> None:
    (peer, _), courier = agent, Courier()
    other, connection = an_agent()
    courier.fetch(peer, checkpoint(1))
    courier.fetch(other, checkpoint(2))
    courier.forget(peer)
    assert asked_for(connection) == [2]
    courier.fetch(other, checkpoint(3))
    courier.forget(other)
    assert not courier.is_busy
