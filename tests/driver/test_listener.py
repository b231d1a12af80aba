"""Messages of agents reach the driver complete and in order, and no agent delays the others."""

import contextlib
import errno
import itertools
import pickle
import queue
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from ear import GONE, TOKEN, assert_hung_up, dialled, framed, heard, listening
from flytekitplugins.daskpytorch.driver import listener as module
from flytekitplugins.daskpytorch.driver.agents import Action
from flytekitplugins.daskpytorch.driver.listener import Listener
from flytekitplugins.daskpytorch.protocol import framing
from flytekitplugins.daskpytorch.protocol.checkpoints import CheckpointEntry
from flytekitplugins.daskpytorch.protocol.framing import Connection
from flytekitplugins.daskpytorch.protocol.messages import Beat, Leaving, Lines, Upload
from processes import num_open_files, until


@pytest.fixture
def events() -> queue.SimpleQueue[Action]:
    return queue.SimpleQueue()


@pytest.fixture
def listener(events: queue.SimpleQueue[Action]) -> Iterator[Listener]:
    ear = listening(TOKEN, events)
    yield ear
    ear.end()


@pytest.fixture
def dial(listener: Listener, events: queue.SimpleQueue[Action]) -> Iterator[Callable[[], Connection]]:
    """Connects an agent whose first word has been heard."""
    agents: list[Connection] = []

    def dial() -> Connection:
        agents.append(dialled(listener))
        agents[-1].send(Leaving())
        assert heard(events) == Leaving()
        return agents[-1]

    yield dial
    for each in agents:
        each.close()


@pytest.mark.parametrize("cut", [1, 7, 8, 9, -1])
def test_an_agent_that_stops_within_a_message_holds_up_no_other(
    cut: int, dial: Callable[[], Connection], events: queue.SimpleQueue[Action]
) -> None:
    stuck, other = dial(), dial()
    message = framed(pickle.dumps(Lines(7, ["late"])))
    stuck._sock.sendall(message[:cut])
    for rank in range(3):
        other.send(Lines(rank, []))
        assert heard(events) == Lines(rank, [])
    stuck._sock.sendall(message[cut:] + framed(pickle.dumps(Leaving())))
    assert [heard(events), heard(events)] == [Lines(7, ["late"]), Leaving()]


def test_a_message_that_cannot_be_opened_ends_only_its_agent(
    dial: Callable[[], Connection], events: queue.SimpleQueue[Action], capfd: pytest.CaptureFixture[str]
) -> None:
    broken, other = dial(), dial()
    broken.send_frame(b"no pickle")
    assert heard(events) == GONE
    assert "UnpicklingError" in capfd.readouterr().err
    other.send(Leaving())
    assert heard(events) == Leaving()


def test_what_an_agent_said_before_it_went_is_heard(
    dial: Callable[[], Connection], events: queue.SimpleQueue[Action]
) -> None:
    connection = dial()
    for rank in range(100):
        connection.send(Lines(rank, []))
    connection.close()
    assert [heard(events) for _ in range(101)] == [*(Lines(rank, []) for rank in range(100)), GONE]


def test_agents_wait_while_too_much_has_not_been_taken(
    events: queue.SimpleQueue[Action], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 5)
    listener = listening(TOKEN, events)
    request.addfinalizer(listener.end)
    connection = dialled(listener)
    request.addfinalizer(connection.close)
    for rank in range(50):
        connection.send(Lines(rank, []))
    for rank in range(20):
        until(lambda: events.qsize() == 5, "as much as may wait")
        assert heard(events) == Lines(rank, [])
        assert events.qsize() <= 5
    until(lambda: events.qsize() == 5, "as much as may wait")
    listener.close()  # nobody will take what is left, and nobody waits for that
    until(lambda: events.qsize() == 30, "all the rest")


def test_the_end_leaves_no_connection_no_thread_and_no_file(events: queue.SimpleQueue[Action]) -> None:
    files, threads = num_open_files(), set(threading.enumerate())
    is_serving = threading.Event()

    def serve(connection: Connection, request: object) -> None:
        is_serving.set()
        connection.read(1)

    ear = listening(TOKEN, events, serve)
    callers = [dialled(ear) for _ in range(3)]
    agent, sender, _ = callers
    agent.send(Leaving())
    until(lambda: events.qsize() == 1, "the agent's word, which has its connection and is never taken")
    sender.send(Upload(CheckpointEntry(attempt=0, step=1, size=9, digest="")))
    assert is_serving.wait(60)
    callers.append(Connection(socket.create_connection(ear.address)))  # a stranger
    ear.end()
    for each in callers:
        assert_hung_up(each)
    assert set(threading.enumerate()) <= threads
    assert num_open_files() <= files


# ---- What this process may run out of


def test_without_files_for_a_while_callers_wait_and_are_heard_afterwards(
    events: queue.SimpleQueue[Action], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    num_calls, pauses = itertools.count(), list[float]()

    def watch(_: socket.socket) -> None:
        if next(num_calls) < 3:
            raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(framing, "watch_peer", watch)
    monkeypatch.setattr(module.time, "sleep", pauses.append)
    listener = listening(TOKEN, events)
    request.addfinalizer(listener.end)
    strangers = [socket.create_connection(listener.address) for _ in range(3)]
    until(lambda: pauses.count(module.ACCEPT_PAUSE) == 3, "three failures")
    with contextlib.closing(dialled(listener)) as agent:
        agent.send(Leaving())
        assert heard(events) == Leaving()
    for each in strangers:
        each.close()


# ---- Signs of life


def test_the_newest_heartbeat_is_there_when_the_agents_next_message_is_heard(
    dial: Callable[[], Connection], listener: Listener, events: queue.SimpleQueue[Action]
) -> None:
    agent = dial()
    for count in (1, 2):
        agent.send(Beat({1: count}))
    agent.send(Leaving())  # its rank may be another attempt's from here on
    assert heard(events) == Leaving()
    assert list(listener.beats.values()) == [Beat({1: 2})]
