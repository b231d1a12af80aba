"""Driver and agent prove to each other that they are of one gang. Nothing from a connection is unpickled before.

The driver sends a challenge; the agent answers with one of its own and a proof, the driver with its proof. A proof is
the HMAC of both challenges under the gang's token, which itself does not travel. The two sides' proofs differ, so that
what an agent answers proves nobody the driver. All sizes are fixed: a stranger cannot make anybody read more.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import time
from multiprocessing.connection import Connection

__all__ = ["ANSWER_SIZE", "challenge", "hang_up", "introduce", "prove"]

AGENT, DRIVER = b"agent", b"driver"
CHALLENGE_SIZE = 32
PROOF_SIZE = 32
ANSWER_SIZE = CHALLENGE_SIZE + PROOF_SIZE
"""Bytes that an agent sends."""
PATIENCE = 60.0
"""Seconds for the driver to prove itself: it may have thousands of agents to meet, and strangers to send away."""


def challenge() -> bytes:
    """What the driver begins with."""
    return os.urandom(CHALLENGE_SIZE)


def prove(token: bytes, challenge: bytes, answer: bytes) -> bytes:
    """The driver's proof, for an agent that has proved itself.

    Raises:
        ConnectionRefusedError: This is no agent of the gang.
    """
    theirs, proof = answer[:CHALLENGE_SIZE], answer[CHALLENGE_SIZE:]
    if not hmac.compare_digest(proof, _proof(token, AGENT, challenge, theirs)):
        raise ConnectionRefusedError("whoever called does not know the gang's token")
    return _proof(token, DRIVER, challenge, theirs)


def introduce(sock: socket.socket, token: bytes) -> Connection:
    """The agent's side; takes the socket over.

    Raises:
        ConnectionRefusedError: This is not the gang's driver; the connection is closed.
    """
    try:
        _meet(sock, token)
    except OSError as error:
        sock.close()
        raise ConnectionRefusedError("whoever is there does not know the gang's token") from error
    sock.settimeout(None)
    return Connection(sock.detach())


def _meet(sock: socket.socket, token: bytes) -> None:
    deadline = time.monotonic() + PATIENCE
    theirs, mine = _take(sock, CHALLENGE_SIZE, deadline), challenge()
    sock.sendall(mine + _proof(token, AGENT, theirs, mine))
    if not hmac.compare_digest(_take(sock, PROOF_SIZE, deadline), _proof(token, DRIVER, theirs, mine)):
        raise ConnectionRefusedError("a wrong proof")


def _take(sock: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        if not (more := sock.recv(size - len(data))):
            raise ConnectionResetError("it has hung up")
        data += more
    return data


def _proof(token: bytes, role: bytes, of_driver: bytes, of_agent: bytes) -> bytes:
    return hmac.digest(token, role + of_driver + of_agent, "sha256")


def hang_up(connection: Connection) -> None:
    """End a connection for both sides; a thread that reads from it wakes up, which it would not if it were closed."""
    with contextlib.suppress(OSError):
        sock = socket.socket(fileno=connection.fileno())  # no copy, for which there may be no descriptor
        try:
            sock.shutdown(socket.SHUT_RDWR)
        finally:
            sock.detach()
