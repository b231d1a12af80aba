"""Reports of ranks reach the driver: in few messages, none lost, all in order."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from enum import IntEnum
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest

from flytekitplugins.daskpytorch.protocol import payload, reports
from flytekitplugins.daskpytorch.protocol.checkpoint_file import CheckpointFile
from flytekitplugins.daskpytorch.protocol.reports import FolderWanted, Held, Ready, Report, Returned
from flytekitplugins.daskpytorch.records import LogRecord


@pytest.fixture
def channel() -> Iterator[tuple[Connection, Connection]]:
    """The agent's end, and the rank's."""
    agents, ranks = Pipe()
    with agents, ranks:
        yield agents, ranks


def record(step: int, **metrics: float | str) -> LogRecord:
    return LogRecord(rank=0, step=step, num_steps=None, time=0.0, metrics=metrics)


def gathered_until_closed(channel: Connection) -> list[bytes]:
    messages: list[bytes] = []
    try:
        while True:
            messages += reports.gather(channel).messages
    except EOFError:
        return messages


def opened(messages: list[bytes]) -> list[Report]:
    return [report for message in messages for report in reports.unpack(message)]


def test_reports_that_have_come_go_together_in_order(channel: tuple[Connection, Connection]) -> None:
    agents, ranks = channel
    file = CheckpointFile(attempt=0, step=5, size=1, digest="0" * 64)
    sent = [Ready(), *map(record, range(50)), Held(7), file, FolderWanted(), Returned(b"done")]
    for report in sent:
        ranks.send_bytes(pickle.dumps(report))
    [message] = reports.gather(agents).messages
    assert list(reports.unpack(message)) == sent


def test_nothing_waits_for_others_to_come(channel: tuple[Connection, Connection]) -> None:
    agents, ranks = channel
    for step in range(3):
        ranks.send_bytes(pickle.dumps(record(step)))
        assert opened(reports.gather(agents).messages) == [record(step)]


def test_many_records_are_few_messages_and_none_grows_large(channel: tuple[Connection, Connection]) -> None:
    agents, ranks = channel
    one = pickle.dumps(record(0, loss=0.5))
    for _ in range(200):
        ranks.send_bytes(one)
    ranks.close()
    messages = gathered_until_closed(agents)
    assert b"".join(messages) == 200 * one
    assert len(messages) == -(-200 // -(-reports.MAX_TOGETHER // len(one)))
    assert all(len(message) < reports.MAX_TOGETHER + len(one) for message in messages)


def test_what_is_large_stays_alone_and_in_order(channel: tuple[Connection, Connection]) -> None:
    agents, ranks = channel
    large = pickle.dumps(Returned(b"x" * reports.MAX_TOGETHER))
    [piece] = map(pickle.dumps, payload.cut("key", "path", b"data"))
    log = pickle.dumps(record(0))
    sent = [log, log, piece, large, log, large, piece, log]
    for report in sent:
        ranks.send_bytes(report)
    ranks.close()
    messages = gathered_until_closed(agents)
    assert messages == [log + log + piece, large, log, large, piece + log]


def test_signs_of_life_are_read_and_not_passed_on(channel: tuple[Connection, Connection]) -> None:
    agents, ranks = channel
    for number in range(2):
        ranks.send_bytes(reports.NUM_MOVES.pack(5 + number))
        ranks.send_bytes(pickle.dumps(record(number)))
    gathered = reports.gather(agents)
    assert gathered.num_moves == 6
    assert opened(gathered.messages) == [record(0), record(1)]
    ranks.send_bytes(reports.NUM_MOVES.pack(7))
    assert reports.gather(agents) == reports.Gathered([], 7)
    ranks.send_bytes(pickle.dumps(Ready()))
    assert reports.gather(agents).num_moves is None


class Money(float):
    """A number of a class of the user's."""


class Level(IntEnum):
    HIGH = 3


class Colour(str):
    """A text that shows itself as another one."""

    __slots__ = ()

    def __str__(self) -> str:
        return self.upper()


@pytest.mark.parametrize(
    ("given", "plain"),
    [(1, 1), (0.5, 0.5), ("a", "a"), (True, True), (Money(2.5), 2.5), (Level.HIGH, 3), (Colour("red"), "red")],
)
def test_numbers_and_texts_of_the_users_classes_travel_as_plain_ones(given: float | str, plain: float | str) -> None:
    record = LogRecord(rank=0, step=1, num_steps=None, time=0.0, metrics={"given": given, "other": object()})
    [bare] = record.bare().metrics.values()
    assert bare == plain
    assert type(bare) is type(plain)
    assert pickle.loads(pickle.dumps(bare)) == plain
