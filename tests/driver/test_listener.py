"""Messages of agents reach the driver complete and in order, and no agent delays the others."""

import contextlib
import errno
import itertools
import pickle
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from ear import GONE, assert_hung_up, dialled, framed, heard, listening
from flytekitplugins.daskpytorch.driver import listener as module
from flytekitplugins.daskpytorch.driver.listener import Listener
from flytekitplugins.daskpytorch.protocol import framing
from flytekitplugins.daskpytorch.protocol.checkpoints import CheckpointEntry
from flytekitplugins.daskpytorch.protocol.framing import Connection
from flytekitplugins.daskpytorch.protocol.messages import Beat, Leaving, Lines, Upload
from processes import num_open_files, until

Dial = Callable[[], Connection]


@pytest.fixture
def listener() -> Iterator[Listener]:
    ear = listening()
    yield ear
    ear.end()


@pytest.fixture
def dial(listener: Listener) -> Iterator[Dial]:
    """Connects an agent whose first word has been heard."""
    agents: list[Connection] = []

    def dial() -> Connection:
        agents.append(dialled(listener))
        agents[-1].send(Leaving())
        assert heard(listener) == Leaving()
        return agents[-1]

    yield dial
    for each in agents:
        each.close()


@pytest.mark.parametrize("cut", [1, 7, 8, 9, -1])
def test_an_agent_that_stops_within_a_message_holds_up_no_other(cut: int, dial: Dial, listener: Listener) -> None:
    stuck, other = dial(), dial()
    message = framed(pickle.dumps(Lines(7, ["late"])))
    stuck._sock.sendall(message[:cut])
    for rank in range(3):
        other.send(Lines(rank, []))
        assert heard(listener) == Lines(rank, [])
    stuck._sock.sendall(message[cut:] + framed(pickle.dumps(Leaving())))
    assert [heard(listener), heard(listener)] == [Lines(7, ["late"]), Leaving()]


def test_a_message_that_cannot_be_opened_ends_only_its_agent(
    dial: Dial, listener: Listener, capfd: pytest.CaptureFixture[str]
) -> None:
    broken, other = dial(), dial()
    broken.send_frame(b"no pickle")
    assert heard(listener) == GONE
    assert "UnpicklingError" in capfd.readouterr().err
    other.send(Leaving())
    assert heard(listener) == Leaving()


def test_what_an_agent_said_before_it_went_is_heard(dial: Dial, listener: Listener) -> None:
    connection = dial()
    for rank in range(100):
        connection.send(Lines(rank, []))
    connection.close()
    assert [heard(listener) for _ in range(101)] == [*(Lines(rank, []) for rank in range(100)), GONE]


def test_agents_wait_while_too_much_has_not_been_taken(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 5)
    listener = listening()
    request.addfinalizer(listener.end)
    connection = dialled(listener)
    request.addfinalizer(connection.close)
    for rank in range(50):
        connection.send(Lines(rank, []))
    for rank in range(20):
        until(lambda: listener._calls.qsize() == 5, "as much as may wait")
        assert heard(listener) == Lines(rank, [])
        assert listener._calls.qsize() <= 5
    until(lambda: listener._calls.qsize() == 5, "as much as may wait")
    listener.close()  # nobody will take what is left, and nobody waits for that
    until(lambda: listener._calls.qsize() == 30, "all the rest")


def test_the_end_leaves_no_connection_no_thread_and_no_file() -> None:
    files, threads = num_open_files(), set(threading.enumerate())
    is_serving = threading.Event()

    def serve(connection: Connection, request: object) -> None:
        is_serving.set()
        connection.read(1)

    ear = listening(serve)
    callers = [dialled(ear) for _ in range(3)]
    agent, sender, _ = callers
    agent.send(Leaving())
    until(lambda: ear._calls.qsize() == 1, "the agent's word, which has its connection and is never taken")
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
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    num_calls, pauses = itertools.count(), list[float]()

    def watch(_: socket.socket) -> None:
        if next(num_calls) < 3:
            raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(framing, "watch_peer", watch)
    monkeypatch.setattr(module.time, "sleep", pauses.append)
    listener = listening()
    request.addfinalizer(listener.end)
    strangers = [socket.create_connection(listener.address) for _ in range(3)]
    until(lambda: pauses.count(module.ACCEPT_PAUSE) == 3, "three failures")
    with contextlib.closing(dialled(listener)) as agent:
        agent.send(Leaving())
        assert heard(listener) == Leaving()
    for each in strangers:
        each.close()


# ---- Signs of life


def test_the_newest_heartbeat_is_there_when_the_agents_next_message_is_heard(dial: Dial, listener: Listener) -> None:
    agent = dial()
    for count in (1, 2):
        agent.send(Beat({1: count}))
    agent.send(Leaving())  # its rank may be another attempt's from here on
    assert heard(listener) == Leaving()
    assert list(listener.beats.values()) == [Beat({1: 2})]
