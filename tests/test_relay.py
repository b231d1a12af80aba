"""What ranks report, on its way to the driver: few messages, nothing lost, nothing out of order."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from enum import IntEnum
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest

from flytekitplugins.daskpytorch.context import LogRecord
from flytekitplugins.daskpytorch.protocol import relay, result_frames
from flytekitplugins.daskpytorch.protocol.result_frames import is_piece
from flytekitplugins.daskpytorch.rank.main import _bare

pytestmark = pytest.mark.timeout(60)


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
            messages += relay.gather(channel)
    except EOFError:
        return messages


def opened(messages: list[bytes]) -> list[object]:
    return [report for message in messages for report in relay.unpack(message)]


def test_reports_that_have_come_go_together_in_order(channel: tuple[Connection, Connection]) -> None:
    agents, ranks = channel
    reports = [*(("log", record(step)) for step in range(50)), ("saved", 3), ("result", b"done")]
    for report in reports:
        ranks.send_bytes(relay.pack(*report))
    [message] = relay.gather(agents)
    assert list(relay.unpack(message)) == reports


def test_nothing_waits_for_others_to_come(channel: tuple[Connection, Connection]) -> None:
    agents, ranks = channel
    for step in range(3):
        ranks.send_bytes(relay.pack("log", record(step)))
        assert opened(relay.gather(agents)) == [("log", record(step))]


def test_many_records_are_few_messages_and_none_grows_large(channel: tuple[Connection, Connection]) -> None:
    agents, ranks = channel
    one = relay.pack("log", record(0, loss=0.5))
    for _ in range(200):
        ranks.send_bytes(one)
    ranks.close()
    messages = gathered_until_closed(agents)
    assert b"".join(messages) == 200 * one
    assert len(messages) == -(-200 // -(-relay.MAX_TOGETHER // len(one)))
    assert all(len(message) < relay.MAX_TOGETHER + len(one) for message in messages)


def test_what_a_rank_reported_before_it_was_killed_arrives(channel: tuple[Connection, Connection]) -> None:
    agents, ranks = channel
    for step in range(10):
        ranks.send_bytes(relay.pack("log", record(step)))
    ranks.close()
    assert [value.step for _, value in opened(gathered_until_closed(agents))] == list(range(10))


def test_pieces_of_results_and_what_is_large_stay_alone_and_in_order(channel: tuple[Connection, Connection]) -> None:
    agents, ranks = channel
    [piece], log = result_frames.pack("key", "path", b"data"), relay.pack("log", record(0))
    large = relay.pack("result", b"x" * relay.MAX_TOGETHER)
    sent = [log, log, piece, piece, log, large, log, large, piece, log]
    for report in sent:
        ranks.send_bytes(report)
    ranks.close()
    messages = gathered_until_closed(agents)
    assert b"".join(messages) == b"".join(sent)
    assert [message for message in messages if is_piece(message)] == [piece] * 3
    assert messages.count(large) == 2
    assert messages[0] == log + log


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
    assert _bare(given) == plain
    assert type(_bare(given)) is type(plain)
    assert pickle.loads(pickle.dumps(_bare(given))) == plain
