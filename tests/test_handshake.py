"""Strangers: whoever does not know a gang's token is sent away, and nothing that he sends is unpickled."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from flytekitplugins.daskpytorch import agent, handshake
from flytekitplugins.daskpytorch.listener import Event, Listener
from flytekitplugins.daskpytorch.messages import AgentOrder, Beat

pytestmark = pytest.mark.timeout(60)

TOKEN = b"t" * 32


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def bomb(tmp_path: Path) -> Iterator[Bomb]:
    bomb = Bomb(tmp_path / "exploded")
    yield bomb
    assert not bomb.path.exists()


@pytest.fixture
def events() -> queue.SimpleQueue[Event]:
    return queue.SimpleQueue()


@pytest.fixture
def listener(events: queue.SimpleQueue[Event]) -> Iterator[Listener]:
    listener = Listener("127.0.0.1", TOKEN, events)
    yield listener
    listener.close()


def order(address: tuple[str, int], token: bytes = TOKEN) -> AgentOrder:
    return AgentOrder(worker="w", driver=address, num_ranks=1, token=token)


def connected(listener: Listener) -> Connection:
    return Connection(socket.create_connection(listener.address).detach())


def assert_sent_away(stranger: Connection, events: queue.SimpleQueue[Event]) -> None:
    with contextlib.suppress(ConnectionError, EOFError):
        while stranger.poll(20):
            stranger.recv_bytes()
        raise AssertionError("he is still connected")
    assert events.empty()
    stranger.close()


def impostor(play: Callable[..., None], num_agents: int = 1) -> tuple[tuple[str, int], threading.Thread]:
    """Somebody else at the driver's address, who does so with the agents that call him."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with server, contextlib.ExitStack() as at_last, contextlib.suppress(OSError, EOFError):
            sockets = [at_last.enter_context(contextlib.closing(server.accept()[0])) for _ in range(num_agents)]
            play(*(at_last.enter_context(Connection(sock.detach())) for sock in sockets))

    thread = threading.Thread(target=serve)
    thread.start()
    return server.getsockname()[:2], thread


# ---- Strangers at the driver


def test_an_agent_that_knows_the_token_is_heard(listener: Listener, events: queue.SimpleQueue[Event]) -> None:
    with agent.dial(order(listener.address)) as connection:
        connection.send(Beat())
        kind, _, message = events.get(timeout=20)
        assert (kind, message) == ("message", Beat())
    assert events.get(timeout=20)[0] == "gone"


def test_the_token_does_not_travel(monkeypatch: pytest.MonkeyPatch, listener: Listener) -> None:
    sent: list[bytes] = []
    real = Connection._send_bytes

    def spy(self: Connection, data: bytes) -> None:
        sent.append(bytes(data))
        real(self, data)

    monkeypatch.setattr(Connection, "_send_bytes", spy)
    agent.dial(order(listener.address)).close()
    assert len(sent) == 6
    assert not any(TOKEN[:8] in data for data in sent)


def test_a_strangers_pickle_is_not_opened(listener: Listener, events: queue.SimpleQueue[Event], bomb: Bomb) -> None:
    stranger = connected(listener)
    for _ in range(3):
        with contextlib.suppress(ConnectionError):
            stranger.send(bomb)
    assert_sent_away(stranger, events)


def test_an_agent_of_another_gang_is_sent_away(listener: Listener, events: queue.SimpleQueue[Event]) -> None:
    with pytest.raises(ConnectionError, match="is not its gang's"):
        agent.dial(order(listener.address, token=b"u" * 32))
    assert events.empty()


def test_a_challenge_that_is_sent_back_proves_nothing(listener: Listener, events: queue.SimpleQueue[Event]) -> None:
    stranger = connected(listener)
    challenge = stranger.recv_bytes()
    stranger.send_bytes(challenge)
    assert_sent_away(stranger, events)


def test_a_stranger_who_says_nothing_is_sent_away_and_keeps_no_agent_out(
    listener: Listener, events: queue.SimpleQueue[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "PATIENCE", 0.3)
    stranger = connected(listener)
    with agent.dial(order(listener.address)) as connection:
        connection.send(Beat())
        assert events.get(timeout=20)[2] == Beat()
        assert_sent_away(stranger, events)
        connection.send(Beat())  # the limit was only for the handshake
        assert events.get(timeout=20)[2] == Beat()


# ---- Strangers in the driver's place


def test_an_agent_opens_nothing_from_one_who_is_not_its_driver(bomb: Bomb) -> None:
    def play(called: Connection) -> None:
        called.send_bytes(b"#CHALLENGE#" + b"x" * 20)
        called.recv_bytes()
        called.send_bytes(b"#WELCOME#")
        called.send(bomb)
        called.recv_bytes()

    address, thread = impostor(play)
    with pytest.raises(ConnectionError, match=r"took for the driver, is not its gang's .*another process its port\?"):
        agent.dial(order(address))
    thread.join(20)


def test_an_agent_survives_one_who_begins_with_something_else(bomb: Bomb) -> None:
    def play(called: Connection) -> None:
        called.send_bytes(pickle.dumps(bomb))
        called.recv_bytes()

    address, thread = impostor(play)
    with pytest.raises(ConnectionError, match="is not its gang's"):
        agent.dial(order(address))
    thread.join(20)


def test_one_agents_answer_does_not_prove_another_one_the_driver() -> None:
    """The impostor has each of two agents answer the other's challenge."""

    def play(first: Connection, second: Connection) -> None:
        first.send_bytes(b"#CHALLENGE#" + b"x" * 20)
        first.recv_bytes()
        first.send_bytes(b"#WELCOME#")
        second.send_bytes(first.recv_bytes())
        first.send_bytes(second.recv_bytes())
        second.close()
        first.recv_bytes()

    address, thread = impostor(play, num_agents=2)
    refused: queue.SimpleQueue[Exception] = queue.SimpleQueue()

    def dial() -> None:
        try:
            agent.dial(order(address)).close()
        except ConnectionError as error:
            refused.put(error)

    agents = [threading.Thread(target=dial) for _ in range(2)]
    for each in agents:
        each.start()
    for each in (*agents, thread):
        each.join(20)
    assert refused.qsize() == 2
