"""A driver's ear whose gang's state only returns what it hears."""

import contextlib
import queue
import socket
from collections.abc import Callable
from typing import Any

from flytekitplugins.daskpytorch.driver.listener import Listener
from flytekitplugins.daskpytorch.driver.received import ReceivedResults
from flytekitplugins.daskpytorch.protocol.framing import SIZE, Connection, dial
from flytekitplugins.daskpytorch.protocol.host import AgentOrder

GONE = "gone"
TOKEN = b"t" * 32


class Heard:
    """In the place of a gang's state: returns what it hears."""

    def __init__(self) -> None:
        self.received = ReceivedResults()

    def hear(self, connection: Connection, message: object) -> object:
        return message

    def hear_of_rank(self, connection: Connection, rank: int, said: object) -> object:
        return said

    def note_end(self, connection: Connection) -> str:
        return GONE


def refuse(*_: object) -> Any:
    """In place of what takes files, where none is sent."""
    raise ConnectionRefusedError("no files are taken here")


def listening(serve: Callable[..., None] = refuse) -> Listener:
    """A driver's ear."""
    ear = Listener("127.0.0.1", TOKEN, queue.SimpleQueue(), serve)
    ear.listen(Heard())  # type: ignore[arg-type]
    return ear


def heard(ear: Listener) -> Any:
    """The next call of the listener, as a record of `Heard`."""
    return ear._calls.get()()


def order(address: tuple[str, int]) -> AgentOrder:
    """The order of an agent that calls this address."""
    return AgentOrder(worker="w", driver=address, token=TOKEN)


def dialled(ear: Listener) -> Connection:
    """An agent's connection that has sent no message."""
    return dial(order(ear.address))


def framed(data: bytes) -> bytes:
    """The bytes of one frame."""
    return SIZE.pack(len(data)) + data


def assert_hung_up(sock: socket.socket | Connection) -> None:
    """The driver closes this connection."""
    connection = sock if isinstance(sock, Connection) else Connection(sock)
    with contextlib.closing(connection), contextlib.suppress(ConnectionError):
        while connection.read(1 << 16):
            pass
