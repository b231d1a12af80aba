"""Messages of agents reach the driver complete and in order, and no agent delays the others."""

import pickle
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import ear
from ear import GONE, TOKEN, assert_hung_up, dialled, framed, heard, listening
from flytekitplugins.daskpytorch.driver import listener as module
from flytekitplugins.daskpytorch.driver.agents import Action
from flytekitplugins.daskpytorch.driver.listener import Listener
from flytekitplugins.daskpytorch.driver.request import request_for
from flytekitplugins.daskpytorch.driver.supervisor import GangCancelledError, Supervisor
from flytekitplugins.daskpytorch.node.agent import OwnNode
from flytekitplugins.daskpytorch.node.hardware import describe_node
from flytekitplugins.daskpytorch.process.folders import scratch_folder
from flytekitplugins.daskpytorch.protocol import framing
from flytekitplugins.daskpytorch.protocol.checkpoints import CheckpointEntry
from flytekitplugins.daskpytorch.protocol.framing import Connection
from flytekitplugins.daskpytorch.protocol.host import AgentOrder, OnFailure
from flytekitplugins.daskpytorch.protocol.messages import Beat, Hello, Leaving, Lines, Upload
from flytekitplugins.daskpytorch.settings import Gang
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


def test_agents_are_heard_after_it_was_closed_and_its_thread_ends_with_the_last(
    listener: Listener, dial: Callable[[], Connection], events: queue.SimpleQueue[Action]
) -> None:
    connection, thread = dial(), listener._thread
    listener.close()
    until(lambda: listener._server.fileno() < 0, "the end of accepting")
    connection.send(Leaving())
    assert heard(events) == Leaving()
    connection.close()
    thread.join()
    assert not thread.is_alive()


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


def test_an_agent_whose_hello_came_too_late_is_hung_up_on_when_its_gang_ends() -> None:
    """As when a gang is cancelled in its start-up: the hello waits behind the cancellation."""
    agents: list[Connection] = []

    class Launcher(OwnNode):
        def launch(self, orders: Sequence[AgentOrder], on_failure: OnFailure) -> None:
            agents.append(framing.dial(orders[0]))
            agents[0].send(Hello(describe_node(orders[0].worker, None), ("127.0.0.1", 1)))
            until(lambda: supervisor._calls.qsize() == 2, "the hello to be heard")

    with scratch_folder("first-"):
        pass  # the first one's shell stays for all that follow
    files, threads = num_open_files(), set(threading.enumerate())
    supervisor = Supervisor(request_for(print, (), {}, Gang()), Launcher())
    supervisor.cancel()
    with pytest.raises(GangCancelledError):
        supervisor.run()
    assert_hung_up(agents[0])
    assert set(threading.enumerate()) <= threads
    assert num_open_files() <= files


# ---- What this process may run out of


EXHAUSTED = """
import os, queue, resource, socket, sys, time
import ear as ears
from flytekitplugins.daskpytorch.driver.agents import Action
from flytekitplugins.daskpytorch.protocol import framing
from flytekitplugins.daskpytorch.protocol.messages import Leaving

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
events = queue.SimpleQueue()
ear = ears.listening(b"t", events)
callers = [socket.socket() for _ in range(3)]
hoard = []
try:
    while True:
        hoard.append(os.dup(0))
except OSError as error:
    print(error, flush=True)
callers[0].connect(ear.address)
time.sleep(0.5)  # it has found no file for him
spent = time.process_time(), time.sleep(0.5), time.process_time()
assert spent[2] - spent[0] < 0.25, "it tries all the time"
for file in hoard:
    os.close(file)
for caller in callers[1:]:
    caller.connect(ear.address)
agents = [framing.introduce(caller, b"t") for caller in callers]
for agent in agents:
    agent.send(Leaving())
    assert events.get()() == Leaving()
ear.end()
print("heard")
"""


def test_without_files_for_a_while_callers_wait_and_are_heard_afterwards() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", EXHAUSTED], cwd=Path(ear.__file__).parent, capture_output=True, text=True, check=False
    )
    assert (ran.stdout.splitlines(), ran.stderr) == (["[Errno 24] Too many open files", "heard"], "")


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
