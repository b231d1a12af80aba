"""A caller without the gang's token is refused, and nothing that it sends is unpickled."""

import contextlib
import os
import pickle
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ear import TOKEN, assert_hung_up, dialled, framed, heard, listening, order
from flytekitplugins.daskpytorch.driver import listener as driver
from flytekitplugins.daskpytorch.driver.listener import Listener
from flytekitplugins.daskpytorch.protocol import framing
from flytekitplugins.daskpytorch.protocol.framing import SIZE
from flytekitplugins.daskpytorch.protocol.messages import Leaving
from processes import num_open_files


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
def listener() -> Iterator[Listener]:
    ear = listening()
    yield ear
    ear.end()


def connected(listener: Listener) -> socket.socket:
    return socket.create_connection(listener.address)


def take(sock: socket.socket, size: int) -> bytes:
    """What is in the next frame, which has this size."""
    data = sock.recv(SIZE.size + size, socket.MSG_WAITALL)
    assert data == framed(data[SIZE.size :])
    assert len(data) == SIZE.size + size
    return data[SIZE.size :]


def assert_sent_away(stranger: socket.socket, listener: Listener) -> None:
    assert_hung_up(stranger)
    assert listener._calls.empty()


def impostor(play: Callable[..., None], num_agents: int = 1) -> tuple[tuple[str, int], threading.Thread]:
    """Somebody else at the driver's address, who does so with the agents that call him."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with server, contextlib.ExitStack() as at_last, contextlib.suppress(OSError):
            play(*(at_last.enter_context(server.accept()[0]) for _ in range(num_agents)))

    thread = threading.Thread(target=serve)
    thread.start()
    return server.getsockname()[:2], thread


# ---- Strangers at the driver


def test_three_messages_of_fixed_sizes_and_the_token_does_not_travel(listener: Listener) -> None:
    """A middleman sees them all."""
    sent: list[bytes] = []

    def listen_in(called: socket.socket) -> None:
        with connected(listener) as driver:
            for source, target, size in ((driver, called, 32), (called, driver, 64), (driver, called, 32)):
                sent.append(take(source, size))
                target.sendall(framed(sent[-1]))

    address, thread = impostor(listen_in)
    framing.dial(order(address)).close()
    thread.join()
    assert len(sent) == 3
    assert not any(TOKEN[:8] in data for data in sent)


def test_a_strangers_pickle_is_not_opened(listener: Listener, bomb: Bomb) -> None:
    stranger = connected(listener)
    with contextlib.suppress(ConnectionError):
        for _ in range(3):
            stranger.sendall(pickle.dumps(bomb))
    assert_sent_away(stranger, listener)


def test_a_challenge_that_is_sent_back_proves_nothing(listener: Listener) -> None:
    stranger = connected(listener)
    challenge = take(stranger, 32)
    stranger.sendall(framed(2 * challenge))
    assert_sent_away(stranger, listener)


# ---- Strangers in the driver's place


def prove_falsely(called: socket.socket, bomb: bytes) -> None:
    called.sendall(framed(b"x" * 32))
    take(called, 64)
    called.sendall(framed(b"y" * 32) + framed(bomb))
    called.recv(1)


def begin_with_something_else(called: socket.socket, bomb: bytes) -> None:
    called.sendall(bomb)
    called.recv(1 << 16)
    called.shutdown(socket.SHUT_WR)
    called.recv(1)


def hang_up(called: socket.socket, bomb: bytes) -> None:
    called.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("play", "told"),
    [
        (prove_falsely, "another program may use its port"),
        (begin_with_something_else, "another program may use its port"),
        (hang_up, r"\(it hung up\).* too many other callers"),
    ],
)
def test_an_agent_opens_nothing_from_one_who_is_not_its_driver(
    play: Callable[[socket.socket, bytes], None], told: str, bomb: Bomb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(framing, "DIAL_TIME", 0.0)
    address, thread = impostor(lambda called: play(called, pickle.dumps(bomb)))
    with pytest.raises(ConnectionError, match=rf"did not prove that .*{told}"):
        framing.dial(order(address))
    thread.join()


def test_one_agents_answer_does_not_prove_another_one_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """The impostor has each of two agents answer the other's challenge."""
    monkeypatch.setattr(framing, "DIAL_TIME", 0.0)

    def play(first: socket.socket, second: socket.socket) -> None:
        first.sendall(framed(b"x" * 32))
        answer = take(first, 64)
        second.sendall(framed(answer[:32]))
        answer = take(second, 64)
        first.sendall(framed(answer[32:]))
        second.close()
        first.recv(1)

    address, thread = impostor(play, num_agents=2)
    refused: queue.SimpleQueue[Exception] = queue.SimpleQueue()

    def dial() -> None:
        try:
            framing.dial(order(address)).close()
        except ConnectionError as error:
            refused.put(error)

    agents = [threading.Thread(target=dial) for _ in range(2)]
    for each in agents:
        each.start()
    for each in (*agents, thread):
        each.join()
    assert refused.qsize() == 2


# ---- Failed connections


def test_a_connection_survives_a_network_that_fails_for_a_moment(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, failures = socket.create_connection, iter([ConnectionRefusedError("for a moment")])

    def connect_later(*how: Any, **more: Any) -> socket.socket:
        for failure in failures:
            raise failure
        return connect(*how, **more)

    monkeypatch.setattr(socket, "create_connection", connect_later)
    with contextlib.closing(dialled(listener)) as connection:
        connection.send(Leaving())
        assert heard(listener) == Leaving()


# ---- Crowds at the driver's port


def test_idle_strangers_in_any_number_take_few_files_and_keep_no_agent_out_for_long(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "AUTHENTICATION_TIMEOUT", 0.3)
    files = num_open_files()
    strangers = [connected(listener) for _ in range(600)]
    assert num_open_files() - files <= len(strangers) + driver.MAX_UNAUTHENTICATED + 1
    with contextlib.closing(dialled(listener)) as connection:
        connection.send(Leaving())
        assert heard(listener) == Leaving()
    for each in strangers:
        each.close()
