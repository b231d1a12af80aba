"""Handshake: driver and agent prove, before any unpickling, that both belong to one gang.

The driver sends a challenge. The agent answers with its own challenge and proof. Then the driver sends its proof. A
proof is an HMAC over role and both challenges, with the gang's token as key. The token itself is not sent. The role
keeps an agent's proof from passing as the driver's. All sizes are fixed, so that a stranger cannot send more.
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
"""Timeout for the driver's proof, in seconds. The driver may have thousands of agents and some strangers to answer."""


def challenge() -> bytes:
    """Return random bytes that the peer's proof must cover."""
    return os.urandom(CHALLENGE_SIZE)


def prove(token: bytes, challenge: bytes, answer: bytes) -> bytes:
    """Check an agent's answer to the driver's challenge, and return the driver's proof.

    Raises:
        ConnectionRefusedError: The peer does not know the gang's token.
    """
    theirs, proof = answer[:CHALLENGE_SIZE], answer[CHALLENGE_SIZE:]
    if not hmac.compare_digest(proof, _proof(token, AGENT, challenge, theirs)):
        raise ConnectionRefusedError("the caller does not know the gang's token")
    return _proof(token, DRIVER, challenge, theirs)


def introduce(sock: socket.socket, token: bytes) -> Connection:
    """Do the agent's side of the handshake. Return a connection that owns the socket.

    Raises:
        ConnectionAbortedError: The peer closed the connection before its proof. The socket is closed.
        ConnectionRefusedError: The peer does not know the gang's token, or sent no proof in time. The socket is closed.
    """
    connection, begun_at = Connection(sock), time.monotonic()
    try:
        _meet(connection, token)
    except (EOFError, OSError) as error:
        connection.close()
        seconds = time.monotonic() - begun_at
        match error:
            case ConnectionRefusedError():
                raise ConnectionRefusedError("the process there does not know the gang's token") from error
            case TimeoutError():
                raise ConnectionRefusedError(
                    f"the process there did not prove within {seconds:.0f} s that it is the gang's driver"
                ) from error
        raise ConnectionAbortedError(
            f"the process there hung up after {seconds:.1f} s, without a proof that it is the gang's driver"
        ) from error
    sock.settimeout(None)
    return connection


def _meet(connection: Connection, token: bytes) -> None:
    deadline = time.monotonic() + PATIENCE
    theirs, mine = connection.recv_frame(CHALLENGE_SIZE, deadline), challenge()
    connection.send_frame(mine + _proof(token, AGENT, theirs, mine))
    if not hmac.compare_digest(connection.recv_frame(PROOF_SIZE, deadline), _proof(token, DRIVER, theirs, mine)):
        raise ConnectionRefusedError("the proof is wrong")


def _proof(token: bytes, role: bytes, of_driver: bytes, of_agent: bytes) -> bytes:
    return hmac.digest(token, role + of_driver + of_agent, "sha256")
