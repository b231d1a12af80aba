"""Driver and agent prove to each other that they are of one gang. Nothing from a connection is unpickled before.

Each answers the other's challenge with its HMAC under the gang's token, which itself does not travel here. The two
sides have keys of their own, so that what an agent answers proves nobody the driver.
"""

from __future__ import annotations

import socket
import struct
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

__all__ = ["admit", "introduce"]

AGENT, DRIVER = b"agent", b"driver"
PATIENCE = 20
"""Seconds for each answer."""


def admit(sock: socket.socket, token: bytes) -> Connection:
    """The driver's side; takes the socket over.

    Raises:
        ConnectionRefusedError: This is no agent of the gang; the connection is closed.
    """
    return _meet(sock, token + DRIVER, token + AGENT, is_first=True)


def introduce(sock: socket.socket, token: bytes) -> Connection:
    """The agent's side; takes the socket over.

    Raises:
        ConnectionRefusedError: This is not the gang's driver; the connection is closed.
    """
    return _meet(sock, token + AGENT, token + DRIVER, is_first=False)


def _meet(sock: socket.socket, mine: bytes, theirs: bytes, *, is_first: bool) -> Connection:
    with sock.dup() as options:
        connection = Connection(sock.detach())
        try:
            _limit(options, PATIENCE)
            if is_first:
                deliver_challenge(connection, theirs)
            answer_challenge(connection, mine)
            if not is_first:
                deliver_challenge(connection, theirs)
            _limit(options, 0)
        except (AuthenticationError, AssertionError, EOFError, OSError) as error:  # a wrong first word is asserted
            connection.close()
            raise ConnectionRefusedError("whoever is there does not know the gang's token") from error
    return connection


def _limit(sock: socket.socket, seconds: float) -> None:
    """How long a read may take; 0: for ever."""
    whole = int(seconds)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", whole, int((seconds - whole) * 1e6)))
