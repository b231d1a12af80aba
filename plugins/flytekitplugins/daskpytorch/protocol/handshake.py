"""Driver and agent prove to each other that they are of one gang. Nothing from a connection is unpickled before.

The driver sends a challenge; the agent answers with one of its own and a proof, the driver with its proof. A proof is
the HMAC of both challenges under the gang's token, which itself does not travel. The two sides' proofs differ, so that
what an agent answers proves nobody the driver. All sizes are fixed: a stranger cannot make anybody read more.
"""

import hmac
import os
import socket
import time

from flytekitplugins.daskpytorch.protocol.framing import Connection

AGENT, DRIVER = b"agent", b"driver"
CHALLENGE_SIZE = 32
PROOF_SIZE = 32
ANSWER_SIZE = CHALLENGE_SIZE + PROOF_SIZE
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
        ConnectionAbortedError: Whoever is there has hung up before that was clear; the connection is closed.
        ConnectionRefusedError: This is not the gang's driver; the connection is closed.
    """
    connection, begun_at = Connection(sock), time.monotonic()
    try:
        _meet(connection, token)
    except (EOFError, OSError) as error:
        connection.close()
        seconds = time.monotonic() - begun_at
        match error:
            case ConnectionRefusedError():
                raise ConnectionRefusedError("whoever is there does not know the gang's token") from error
            case TimeoutError():
                raise ConnectionRefusedError(f"whoever is there did not prove anything for {seconds:.0f} s") from error
        raise ConnectionAbortedError(f"whoever is there hung up after {seconds:.1f} s, and proved nothing") from error
    sock.settimeout(None)
    return connection


def _meet(connection: Connection, token: bytes) -> None:
    deadline = time.monotonic() + PATIENCE
    theirs, mine = connection.recv_frame(CHALLENGE_SIZE, deadline), challenge()
    connection.send_frame(mine + _proof(token, AGENT, theirs, mine))
    if not hmac.compare_digest(connection.recv_frame(PROOF_SIZE, deadline), _proof(token, DRIVER, theirs, mine)):
        raise ConnectionRefusedError("a wrong proof")


def _proof(token: bytes, role: bytes, of_driver: bytes, of_agent: bytes) -> bytes:
    return hmac.digest(token, role + of_driver + of_agent, "sha256")
