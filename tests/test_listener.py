"""The driver's ear: what agents say arrives whole and in order, and none of them holds up the others."""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest

from flytekitplugins.daskpytorch import agent, listener
from flytekitplugins.daskpytorch.listener import Event, Listener
from flytekitplugins.daskpytorch.messages import AgentOrder, Beat, Lines
from processes import until

pytestmark = pytest.mark.timeout(60)

TOKEN = b"t" * 32


@pytest.fixture
def events() -> queue.SimpleQueue[Event]:
    return queue.SimpleQueue()


@pytest.fixture
def ear(events: queue.SimpleQueue[Event]) -> Iterator[Listener]:
    ear = Listener("127.0.0.1", TOKEN, events)
    yield ear
    ear.close()


@pytest.fixture
def dial(ear: Listener, events: queue.SimpleQueue[Event]) -> Iterator[Callable[[], Connection]]:
    """Connects an agent whose first word has been heard."""
    agents: list[Connection] = []

    def dial() -> Connection:
        agents.append(agent.dial(AgentOrder(worker="w", driver=ear.address, num_ranks=1, token=TOKEN)))
        agents[-1].send(Beat())
        assert heard(events) == Beat()
        return agents[-1]

    yield dial
    for each in agents:
        each.close()


def heard(events: queue.SimpleQueue[Event]) -> Any:
    kind, _, message = events.get(timeout=20)
    return message if kind == "message" else kind


def framed(message: object) -> bytes:
    body = bytes(ForkingPickler.dumps(message))
    return struct.pack("!i", len(body)) + body


def test_messages_arrive_whole_and_in_order(dial: Callable[[], Connection], events: queue.SimpleQueue[Event]) -> None:
    sent = [Lines(rank, ["x" * size]) for rank, size in enumerate([0, 10, 3 * listener.READ_SIZE, 1, 1 << 22, 2])]
    connection = dial()
    for message in sent:
        connection.send(message)
    assert [heard(events) for _ in sent] == sent


@pytest.mark.parametrize("cut", [1, 3, 4, 5, -1])
def test_an_agent_that_stops_within_a_message_holds_up_no_other(
    cut: int, dial: Callable[[], Connection], events: queue.SimpleQueue[Event]
) -> None:
    stuck, other = dial(), dial()
    message = framed(Lines(7, ["late"]))
    os.write(stuck.fileno(), message[:cut])
    for rank in range(3):
        other.send(Lines(rank, []))
        assert heard(events) == Lines(rank, [])
    os.write(stuck.fileno(), message[cut:] + framed(Beat()))
    assert [heard(events), heard(events)] == [Lines(7, ["late"]), Beat()]


def test_a_message_with_the_long_form_of_its_size_is_understood(
    dial: Callable[[], Connection], events: queue.SimpleQueue[Event]
) -> None:
    """As a Connection writes what has 2 GiB or more."""
    connection, body = dial(), bytes(ForkingPickler.dumps(Beat()))
    message = struct.pack("!iQ", -1, len(body)) + body
    os.write(connection.fileno(), message[:7])
    os.write(connection.fileno(), message[7:])
    connection.send(Lines(1, []))
    assert [heard(events), heard(events)] == [Beat(), Lines(1, [])]


def test_a_message_that_cannot_be_opened_ends_only_its_agent(
    dial: Callable[[], Connection], events: queue.SimpleQueue[Event], capfd: pytest.CaptureFixture[str]
) -> None:
    broken, other = dial(), dial()
    broken.send_bytes(b"no pickle")
    assert heard(events) == "gone"
    assert "UnpicklingError" in capfd.readouterr().err
    other.send(Beat())
    assert heard(events) == Beat()


def test_what_an_agent_said_before_it_went_is_heard(
    dial: Callable[[], Connection], events: queue.SimpleQueue[Event]
) -> None:
    connection = dial()
    for rank in range(100):
        connection.send(Lines(rank, []))
    connection.close()
    assert [heard(events) for _ in range(101)] == [*(Lines(rank, []) for rank in range(100)), "gone"]


def test_agents_wait_while_too_much_has_not_been_taken(
    ear: Listener,
    dial: Callable[[], Connection],
    events: queue.SimpleQueue[Event],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener, "MAX_WAITING", 5)
    connection = dial()
    for rank in range(50):
        connection.send(Lines(rank, []))
    for rank in range(20):
        until(lambda: events.qsize() == 5, "as much as may wait")
        assert heard(events) == Lines(rank, [])
        assert events.qsize() <= 5
    ear.close()  # nobody will take what is left, and nobody waits for that
    until(lambda: events.qsize() == 30, "all the rest")


def test_agents_are_heard_after_it_was_closed_and_its_thread_ends_with_the_last(
    ear: Listener, dial: Callable[[], Connection], events: queue.SimpleQueue[Event]
) -> None:
    connection, thread = dial(), listening()[-1]
    ear.close()
    until(lambda: not ear._is_accepting, "the end of accepting")
    connection.send(Beat())
    assert heard(events) == Beat()
    connection.close()
    thread.join(20)
    assert not thread.is_alive()


def listening() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "daskpytorch-listener"]


def test_more_agents_can_come_than_files_could_be_open_before() -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limit[1]))
    try:
        Listener("127.0.0.1", TOKEN, queue.SimpleQueue()).close()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(listener.MAX_FILES, limit[1]), limit[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)


def test_the_work_for_a_message_does_not_grow_with_the_number_of_agents(
    monkeypatch: pytest.MonkeyPatch, events: queue.SimpleQueue[Event]
) -> None:
    few, many = (calls_per_message(monkeypatch, events, num_agents) for num_agents in (5, 100))
    assert many < 1.1 * few


def calls_per_message(monkeypatch: pytest.MonkeyPatch, events: queue.SimpleQueue[Event], num_agents: int) -> float:
    """Function calls of the thread that listens, while each agent says something 20 times, one after the other."""
    calls, original = 0, Listener._listen

    def count(frame: object, event: str, function: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    def listen(ear: Listener) -> None:
        sys.setprofile(count)
        original(ear)

    with monkeypatch.context() as patched, contextlib.ExitStack() as at_last:
        patched.setattr(Listener, "_listen", listen)
        ear = Listener("127.0.0.1", TOKEN, events)
        at_last.callback(ear.close)
        order = AgentOrder(worker="w", driver=ear.address, num_ranks=1, token=TOKEN)
        agents = [at_last.enter_context(agent.dial(order)) for _ in range(num_agents)]
        for each in agents:  # their first words are heard by other threads
            each.send(Beat())
            heard(events)
        until(lambda: len(ear._agents) == num_agents, "all agents")
        before = calls
        for each in agents * 20:
            each.send(Beat())
            heard(events)
        after = calls
    assert [heard(events) for _ in agents] == ["gone"] * num_agents
    return (after - before) / (20 * num_agents)
