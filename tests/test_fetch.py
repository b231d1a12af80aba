"""The driver fetches checkpoints in the right order."""

from __future__ import annotations

import math
import pickle
import time
from multiprocessing.connection import wait

import pytest

from flytekitplugins.daskpytorch.driver.agents import Peer
from flytekitplugins.daskpytorch.driver.checkpoints import Fetches
from flytekitplugins.daskpytorch.protocol.checkpoint_file import CheckpointFile
from flytekitplugins.daskpytorch.protocol.framing import Connection
from flytekitplugins.daskpytorch.protocol.placement import Node
from flytekitplugins.daskpytorch.settings import Keep
from processes import ends


def checkpoint(step: int, **metrics: float) -> CheckpointFile:
    return CheckpointFile(attempt=0, step=step, size=1, digest=f"{step:064x}", metrics=metrics)


def an_agent() -> tuple[Peer, Connection]:
    mine, theirs = ends()
    node = Node(worker="w", host="h", num_cores=1, gpus=(), gpu_names=(), interface=None, versions={})
    return Peer(node, ("h", 1), mine, joined_at=time.monotonic()), theirs


@pytest.fixture
def agent() -> tuple[Peer, Connection]:
    return an_agent()


def asked_for(connection: Connection) -> list[int]:
    steps = []
    while wait([connection.fileno()], 0):
        steps.append(connection.recv().file.step)
    return steps


def test_one_at_a_time_and_the_newest_next(agent: tuple[Peer, Connection]) -> None:
    (peer, connection), fetches = agent, Fetches()
    for step in (1, 2, 3):
        fetches.fetch(peer, checkpoint(step))
    fetches.note_end(checkpoint(7))  # of another one: no news
    assert asked_for(connection) == [1]
    fetches.note_end(checkpoint(1))
    assert asked_for(connection) == [3]
    fetches.note_end(checkpoint(3))
    assert not fetches.is_busy


def test_the_best_ones_are_not_passed_over(agent: tuple[Peer, Connection]) -> None:
    peer, connection = agent
    kept = [checkpoint(1, loss=0.4)]
    fetches = Fetches(Keep(best=2, metric="loss"), lambda: kept)
    losses = {2: 0.9, 3: 0.3, 4: 0.5, 5: math.nan, 6: 0.2, 7: 0.8}
    for step, loss in losses.items():
        fetches.fetch(peer, checkpoint(step, loss=loss))
    came = []
    while fetches.is_busy:
        [step] = asked_for(connection)
        came.append(step)
        kept.append(checkpoint(step, loss=losses[step]))
        fetches.note_end(kept[-1])
    assert came == [2, 3, 6, 7]


def test_the_end_of_one_whose_metric_is_no_number_is_noted(agent: tuple[Peer, Connection]) -> None:
    (peer, _), fetches = agent, Fetches()
    fetches.fetch(peer, checkpoint(1, loss=math.nan))
    fetches.note_end(pickle.loads(pickle.dumps(checkpoint(1, loss=math.nan))))
    assert not fetches.is_busy


def test_what_a_lost_agent_was_to_bring_is_not_waited_for(agent: tuple[Peer, Connection]) -> None:
    (peer, _), fetches = agent, Fetches()
    other, connection = an_agent()
    fetches.fetch(peer, checkpoint(1))
    fetches.fetch(other, checkpoint(2))
    fetches.forget(peer)
    assert asked_for(connection) == [2]
    fetches.fetch(other, checkpoint(3))
    fetches.forget(other)
    assert not fetches.is_busy
