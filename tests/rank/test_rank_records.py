"""A rank's log records reach its agent: several per message, none lost, all in order."""

from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest

from flytekitplugins.daskpytorch.protocol.messages import Ready, Report, unpack
from flytekitplugins.daskpytorch.rank.link import GangLink
from flytekitplugins.daskpytorch.records import LogRecord
from gangs import order_for


@pytest.fixture
def agent() -> Iterator[tuple[GangLink, Connection]]:
    """A rank's link, and its agent's end of it."""
    ranks, agents = Pipe()
    with ranks, agents:
        yield GangLink(ranks, order_for()), agents


def record(step: int, **metrics: float) -> LogRecord:
    return LogRecord(rank=0, step=step, num_steps=None, time=0.0, metrics=metrics)


def arrived(agents: Connection, patience: float = 0.0) -> list[list[Report]]:
    """The messages, each of one or more reports; the first one is waited for."""
    messages = []
    while agents.poll(0.0 if messages else patience):
        messages.append(list(unpack(agents.recv_bytes())))
    return messages


def test_records_that_come_soon_go_together(agent: tuple[GangLink, Connection]) -> None:
    link, agents = agent
    for step in range(5):
        link.records.add(record(step))
    link.send_records()
    assert arrived(agents) == [[record(0)], [record(step) for step in range(1, 5)]]
    link.send_records()
    assert arrived(agents) == []


def test_other_reports_come_after_what_was_logged_before_them(agent: tuple[GangLink, Connection]) -> None:
    link, agents = agent
    link.records.add(record(0))
    link.records.add(record(1))
    link.send(Ready())
    link.records.add(record(2))
    link.submit("loss.json", b"{}")
    said = [report for message in arrived(agents) for report in message]
    assert said[:4] == [record(0), record(1), Ready(), record(2)]
    assert len(said) > 4


def test_records_go_though_nothing_follows_them(agent: tuple[GangLink, Connection]) -> None:
    link, agents = agent
    link.records.add(record(0))
    link.records.add(record(1))
    assert arrived(agents) == [[record(0)]]
    assert arrived(agents, patience=60.0) == [[record(1)]]
