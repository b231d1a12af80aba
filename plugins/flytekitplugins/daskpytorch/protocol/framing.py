"""Connections between driver and agents: frames, and the handshake.

A frame is its size in eight bytes, and a pickled message or a part of the handshake. Only files travel without frames,
right after their announcement.

By the handshake, both ends prove that they belong to one gang, before any unpickling: challenge of the driver,
challenge and proof of the agent, proof of the driver. A proof is an HMAC over role and both challenges, with the gang's
token as key. The role keeps an agent's proof from passing as the driver's. All sizes are fixed, so that a stranger
cannot send more.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import pickle
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flytekitplugins.daskpytorch.protocol.host import AgentOrder
from flytekitplugins.daskpytorch.protocol.placement import title_of

SIZE = struct.Struct("!Q")
MAX_PIECE = 1 << 20
DIAL_TIMEOUT = 30.0
DIAL_TIME, DIAL_PAUSE = 7.0, 0.3
"""Seconds in which a failed connection to the driver is tried again, and pause between two attempts."""
SENT_AT_ONCE = 16 << 20
AGENT, DRIVER = b"agent", b"driver"
CHALLENGE_SIZE = 32
PROOF_SIZE = 32
PROOF_TIMEOUT = 60.0
"""Seconds. The driver may have thousands of agents to answer."""


class Connection:
    """Threads may send while another thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self.heard_at = time.monotonic()

    def fileno(self) -> int:
        """This object buffers no received bytes, so `select` and `poll` work."""
        return self._sock.fileno()

    @property
    def own_address(self) -> str:
        return str(self._sock.getsockname()[0])

    def send(self, message: object) -> None:
        self.send_frame(pickle.dumps(message))

    def recv(self) -> Any:
        """Raises EOFError after the peer has closed the connection."""
        return pickle.loads(self.recv_frame())  # noqa: S301 - the peer has proved that it is of this gang

    def send_frame(self, frame: bytes) -> None:
        with self._lock:
            self._sock.sendall(SIZE.pack(len(frame)) + frame)

    def recv_frame(self, only: int | None = None, deadline: float | None = None) -> bytes:
        """Wait until `deadline` (monotonic clock) for a frame, of `only` bytes if given.

        Raises ConnectionRefusedError for another size, EOFError after the connection's end, and TimeoutError.
        """
        (size,) = SIZE.unpack(self._exactly(SIZE.size, deadline))
        if only not in (None, size):
            raise ConnectionRefusedError(f"the caller announced a message of {size} bytes instead of {only}")
        return self._exactly(size, deadline)

    def _exactly(self, size: int, deadline: float | None) -> bytes:
        data = bytearray()
        while len(data) < size:
            if deadline is not None:
                self._sock.settimeout(max(0.001, deadline - time.monotonic()))
            if not (piece := self.read(min(MAX_PIECE, size - len(data)))):
                raise EOFError
            data += piece
        if deadline is not None:
            self._sock.settimeout(None)
        return bytes(data)

    def send_file(self, path: Path, moved: Callable[[], object] = lambda: None) -> None:
        """`moved` is called after each `SENT_AT_ONCE` bytes."""
        num_sent = 0
        with path.open("rb") as file:
            while count := self._sock.sendfile(file, num_sent, SENT_AT_ONCE):
                num_sent += count
                moved()

    def send_raw(self, data: bytes) -> None:
        with self._lock:
            self._sock.sendall(data)

    def read(self, size: int) -> bytes:
        data = self._sock.recv(size)
        self.heard_at = time.monotonic()
        return data

    def pieces(self, size: int, what: str, moved: Callable[[], object] = lambda: None) -> Iterator[bytes]:
        """Yield the next `size` bytes, which have no frame. EOFError names the bytes by `what`."""
        left = size
        while left:
            if not (piece := self.read(min(MAX_PIECE, left))):
                raise EOFError(
                    f"the connection closed after {size - left:,} of the {size:,} bytes of {what}: the sender's "
                    "process or node may have ended"
                )
            left -= len(piece)
            moved()
            yield piece

    def hang_up(self) -> None:
        """Shut the connection down for both ends. Unlike `close`, this wakes up a thread that waits in `read`."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()


def listen_at(address: str) -> socket.socket:
    """Listen at any free port, with the longest queue that Linux allows: callers beyond the queue connect 1 s later."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=socket.SOMAXCONN)


def watch_peer(sock: socket.socket) -> None:
    """Make the kernel detect the loss of the peer's host within 60 s, by probes also on an idle connection.

    `TCP_USER_TIMEOUT` counts in place of a number of probes (measured: 59.5 s when idle). It also ends a connection to
    a live process that does not read. A driver may stand still for half a minute, in a live migration or a call in C.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 60_000)


# ---- Handshake


def meet(connection: Connection, token: bytes, deadline: float) -> None:
    """Do the driver's part of the handshake, by `deadline` (monotonic clock). Raises EOFError or OSError."""
    mine = os.urandom(CHALLENGE_SIZE)
    connection.send_frame(mine)
    answer = connection.recv_frame(CHALLENGE_SIZE + PROOF_SIZE, deadline)
    theirs, proof = answer[:CHALLENGE_SIZE], answer[CHALLENGE_SIZE:]
    if not hmac.compare_digest(proof, _proof(token, AGENT, mine, theirs)):
        raise ConnectionRefusedError("the caller does not know the gang's token")
    connection.send_frame(_proof(token, DRIVER, mine, theirs))


def introduce(sock: socket.socket, token: bytes) -> Connection:
    """Do the agent's part of the handshake.

    Raises ConnectionRefusedError or TimeoutError if the peer's proof is wrong or late, else EOFError or OSError.
    """
    connection, deadline = Connection(sock), time.monotonic() + PROOF_TIMEOUT
    theirs, mine = connection.recv_frame(CHALLENGE_SIZE, deadline), os.urandom(CHALLENGE_SIZE)
    connection.send_frame(mine + _proof(token, AGENT, theirs, mine))
    if not hmac.compare_digest(connection.recv_frame(PROOF_SIZE, deadline), _proof(token, DRIVER, theirs, mine)):
        raise ConnectionRefusedError("its proof is wrong")
    return connection


def _proof(token: bytes, role: bytes, of_driver: bytes, of_agent: bytes) -> bytes:
    return hmac.digest(token, role + of_driver + of_agent, "sha256")


# ---- The way to the driver, of an agent or of a rank with a file


def dial(order: AgentOrder) -> Connection:
    """Raise ConnectionError if the driver cannot be reached for `DIAL_TIME`, or is another gang's."""
    until = time.monotonic() + DIAL_TIME
    while True:
        try:
            return _dial_once(order)
        except ConnectionError:
            if time.monotonic() >= until:
                raise
        time.sleep(DIAL_PAUSE)


def _dial_once(order: AgentOrder) -> Connection:
    host, port = order.driver
    worker = f"the worker {title_of(order.worker, socket.gethostname())}"
    try:
        sock = socket.create_connection((host, port), timeout=DIAL_TIMEOUT)
    except OSError as error:
        raise ConnectionError(
            f"{worker} cannot reach the driver at {host}:{port} ({error}). Workers must be able to "
            "open connections to the machine that runs the task: check network policies and firewalls."
        ) from error
    sock.settimeout(None)
    watch_peer(sock)
    try:
        return introduce(sock, order.token)
    except (EOFError, OSError) as error:
        sock.close()
        raise ConnectionError(
            f"{worker} called {host}:{port}, and the process there did not prove that it is the gang's "
            f"driver ({str(error) or 'it hung up'}). The driver may have ended, or have too many other callers, "
            "another program may use its port, or a proxy between them may hang up."
        ) from error
