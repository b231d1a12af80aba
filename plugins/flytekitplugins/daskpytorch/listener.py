"""The driver's ear: accepts agents and turns what they say into events."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import resource
import select
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from flytekitplugins.daskpytorch.handshake import admit
from flytekitplugins.daskpytorch.messages import Download, Reported, Upload, watch_peer
from flytekitplugins.daskpytorch.submission import is_piece

__all__ = ["Event", "Listener"]

Event = tuple[str, Any, Any]
"""What happened, to whom (a connection or a worker), and the message or error."""


FileServer = Callable[[Connection, Upload | Download], None]
"""Sends or receives a checkpoint over a connection."""
READ_SIZE = 1 << 16
"""Bytes to take from one agent before the next has its turn."""
MAX_WAITING = 10_000
"""Messages that the supervisor has not taken yet; with so many waiting, agents are not heard, and ranks that report
faster than it takes things in wait until it has: memory is bounded. All that comes has to wait its turn anyway."""
WAIT_INTERVAL = 0.005
MAX_FILES = 1 << 16
"""Open files that this process may have: each agent's connection is one, and each rank's to the rendezvous."""


class Listener:
    """Accepts agents and turns what they say into events; a gang's files go to the vault, its results to the inbox.

    Each caller is met, and each file travels, in a thread of its own; all agents are heard by a single one. Of many
    threads that have something to say at once, each would wake every 5 ms to ask for the interpreter.
    """

    def __init__(
        self,
        host: str,
        token: bytes,
        events: queue.SimpleQueue[Event],
        serve_file: FileServer | None = None,
        keep_piece: Callable[[Reported], object] | None = None,
    ) -> None:
        _allow_files()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # Of agents that dial at once, those beyond the backlog would try again a second later.
        self._server = socket.create_server((host, 0), family=family, backlog=socket.SOMAXCONN)
        self._token = token
        self._events = events
        self._serve_file = serve_file
        self._keep_piece = keep_piece
        self._poll = select.epoll()
        self._poll.register(self._server, select.EPOLLIN)
        self._agents: dict[int, _Agent] = {}
        self._is_accepting = True
        self._is_over = False
        self._is_closing = False
        self._lock = threading.Lock()  # no agent joins once there is nobody to hear it
        self.address: tuple[str, int] = self._server.getsockname()[:2]
        """Host and port to dial."""
        threading.Thread(target=self._listen, name="daskpytorch-listener", daemon=True).start()

    def close(self) -> None:
        """Accept no more; connections stay."""
        self._is_closing = True
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # close alone does not wake the thread that polls

    def _listen(self) -> None:
        with self._poll:
            while self._goes_on():
                for file, _ in self._poll.poll():
                    if file == self._server.fileno():
                        self._accept()
                    else:
                        self._hear(self._agents[file])

    def _goes_on(self) -> bool:
        with self._lock:
            self._is_over = not self._is_accepting and not self._agents
            return not self._is_over

    def _accept(self) -> None:
        try:
            sock, _ = self._server.accept()
        except ConnectionAbortedError:  # the caller has gone again
            return
        except OSError:
            self._poll.unregister(self._server)
            self._server.close()
            self._is_accepting = False
            return
        threading.Thread(target=self._meet, args=(sock,), name="daskpytorch-peer", daemon=True).start()

    def _meet(self, sock: socket.socket) -> None:
        watch_peer(sock)
        try:
            connection = admit(sock, self._token)
        except ConnectionRefusedError:
            return
        try:
            message = connection.recv()
        except (EOFError, OSError):
            self._events.put(("gone", connection, None))
            return
        if isinstance(message, (Upload, Download)) and self._serve_file is not None:
            self._transfer(connection, message, self._serve_file)
            return
        self._note(connection, message)
        self._join(connection)

    def _join(self, connection: Connection) -> None:
        with self._lock:
            if not self._is_over:
                self._agents[connection.fileno()] = _Agent(connection)
                self._poll.register(connection, select.EPOLLIN)
                return
        connection.close()
        self._events.put(("gone", connection, None))

    def _hear(self, agent: _Agent) -> None:
        try:
            for message in agent.read():
                self._note(agent.connection, message)
        except Exception as error:  # whatever it is, it is not the other agents'
            if not isinstance(error, (EOFError, OSError)):
                traceback.print_exc()
            self._poll.unregister(agent.connection)
            with self._lock:
                del self._agents[agent.connection.fileno()]
            self._events.put(("gone", agent.connection, None))

    def _note(self, connection: Connection, message: object) -> None:
        if isinstance(message, Reported) and is_piece(message.report) and self._keep_piece is not None:
            message = self._keep_piece(message)
        while self._events.qsize() >= MAX_WAITING and not self._is_closing:
            time.sleep(WAIT_INTERVAL)
        self._events.put(("message", connection, message))

    def _transfer(self, connection: Connection, request: Upload | Download, serve: FileServer) -> None:
        error: Exception | None = None
        with contextlib.closing(connection):
            try:
                serve(connection, request)
            except Exception as caught:  # whatever it is, the checkpoint is not here
                error = caught
        if isinstance(request, Upload):
            self._events.put(("kept", request.file, error))


def _allow_files() -> None:
    """Raise the limit as far as this process may; many systems begin with 1024, which is 500 ranks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class _Agent:
    """An agent that is heard: takes in what has come, and waits for nothing that is still on its way."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._buffer = bytearray()

    def read(self) -> Iterator[Any]:
        """The messages that have become whole; there must be something to read.

        Raises:
            EOFError: The agent has gone.
        """
        data = os.read(self.connection.fileno(), READ_SIZE)
        if not data:
            raise EOFError
        self._buffer += data
        while (span := _first_message(self._buffer)) is not None:
            with memoryview(self._buffer)[span] as body:
                message = pickle.loads(body)  # noqa: S301 - from our own agent, which has proved to be one
            del self._buffer[: span.stop]
            yield message


def _first_message(buffer: bytearray) -> slice | None:
    """Where it is, if it is whole, behind its size, as `Connection.send` writes it."""
    start = 4
    if len(buffer) < start:
        return None
    (size,) = struct.unpack_from("!i", buffer)
    if size == -1:  # 2 GiB or more
        start = 12
        if len(buffer) < start:
            return None
        (size,) = struct.unpack_from("!Q", buffer, 4)
    return slice(start, start + size) if len(buffer) >= start + size else None
