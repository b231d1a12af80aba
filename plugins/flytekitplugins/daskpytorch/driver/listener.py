"""The driver's ear: accepts agents and turns what they say into events."""

from __future__ import annotations

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
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from flytekitplugins.daskpytorch.protocol import handshake
from flytekitplugins.daskpytorch.protocol.handshake import hang_up
from flytekitplugins.daskpytorch.protocol.messages import Download, Reported, Upload, watch_peer
from flytekitplugins.daskpytorch.protocol.result_frames import is_piece

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
MAX_STRANGERS = 256
"""Callers that have not proved themselves; others wait in the kernel's queue, as they do not use up our files."""
PATIENCE = 20.0
"""Seconds for a stranger to prove that he is an agent ..."""
FIRST_WORD_PATIENCE = 120.0
"""... and then for his first word: to learn of a node's GPUs, torch is imported in a process of its own."""
ACCEPT_PAUSE = 0.2
"""Seconds until callers are accepted again, where this process has no files or no memory for them."""
END_TIME = 5.0
"""Seconds for the threads to end, once all callers are hung up on."""


class Listener:
    """Accepts agents and turns what they say into events; its files and results are kept as they come.

    Each file travels in a thread of its own; all callers are met, and all agents heard, by a single one. Of many
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
        self._server.setblocking(False)  # a caller may have gone again
        self._token = token
        self._events = events
        self._serve_file = serve_file
        self._keep_piece = keep_piece
        self._poll = select.epoll()
        self._poll.register(self._server, select.EPOLLIN)
        self._strangers: dict[int, _Caller] = {}
        self._guests: dict[int, _Caller] = {}  # have proved themselves, and not said who they are; both by deadline
        self._agents: dict[int, _Agent] = {}
        self._is_accepting = True
        self._accept_at: float | None = None
        """Not before, on the monotonic clock: there was no file for a caller."""
        self._is_pausing = False
        self._is_over = False
        self._lock = threading.Lock()
        """Nothing is closed while it is hung up on: its number may be another file's by then."""
        self._known: weakref.WeakSet[Connection] = weakref.WeakSet()
        """Those of agents, also of such that have gone: whoever takes the events closes them."""
        self._transfers: dict[Connection, threading.Thread] = {}
        self.address: tuple[str, int] = self._server.getsockname()[:2]
        """Host and port to dial."""
        self._thread = threading.Thread(target=self._listen, name="daskpytorch-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accept no more, and hang up on callers that have not said who they are; agents and transfers stay."""
        self._is_accepting = False
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # close alone does not wake the thread that polls

    def end(self) -> None:
        """Hang up on all that are left, and wait until no thread and no open file is.

        For when nobody sends to an agent any more, or takes an event.
        """
        self.close()
        with self._lock:
            self._is_over = True
            for connection in (*self._known, *self._transfers):
                hang_up(connection)
        deadline = time.monotonic() + END_TIME
        self._thread.join(END_TIME)
        for thread in list(self._transfers.values()):
            thread.join(max(0.0, deadline - time.monotonic()))
        if not self._thread.is_alive():  # else it does so itself, as soon as a slow disk lets go of it
            self._close_known()

    def _close_known(self) -> None:
        with self._lock:
            for connection in list(self._known):
                connection.close()

    def _listen(self) -> None:
        with self._poll:
            while not self._is_over and (self._is_accepting or self._agents):
                for file, _ in self._poll.poll(self._patience()):
                    if (agent := self._agents.get(file)) is not None:
                        self._hear(agent)
                    elif file == self._server.fileno():
                        self._accept()
                    elif (caller := self._strangers.get(file) or self._guests.get(file)) is not None:
                        self._meet(caller)
                self._keep_time()
            self._shut()
        if self._is_over:
            self._close_known()

    def _patience(self) -> float | None:
        """How long nothing need be done unless somebody calls or speaks."""
        due = [next(iter(callers.values())).deadline for callers in (self._strangers, self._guests) if callers]
        if self._accept_at is not None:
            due.append(self._accept_at)
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _keep_time(self) -> None:
        """Send those away that are late, and let others in or wait."""
        now = time.monotonic()
        for callers in (self._strangers, self._guests):
            while callers and (first := next(iter(callers.values()))).deadline <= now:
                self._send_away(first)
        if self._accept_at is not None and self._accept_at <= now:
            self._accept_at = None
        is_pausing = self._accept_at is not None or len(self._strangers) >= MAX_STRANGERS
        if is_pausing != self._is_pausing and self._server.fileno() >= 0:
            self._poll.modify(self._server, 0 if is_pausing else select.EPOLLIN)  # its end is noticed all the same
            self._is_pausing = is_pausing

    # ---- callers

    def _accept(self) -> None:
        if not self._is_accepting:
            self._shut()
            return
        try:
            sock, _ = self._server.accept()
        except (BlockingIOError, ConnectionError):  # the caller has gone again
            return
        except OSError:  # there may be files and memory again in a while
            self._accept_at = time.monotonic() + ACCEPT_PAUSE
            return
        try:
            caller = _Caller(sock, self._token)
            self._poll.register(sock, select.EPOLLIN)
        except OSError:
            sock.close()
        else:
            self._strangers[sock.fileno()] = caller

    def _shut(self) -> None:
        """Let nobody else in."""
        if self._server.fileno() >= 0:
            self._poll.unregister(self._server)
            self._server.close()
        for caller in (*self._strangers.values(), *self._guests.values()):
            self._send_away(caller)

    def _send_away(self, caller: _Caller) -> None:
        file = caller.sock.fileno()
        del (self._strangers if file in self._strangers else self._guests)[file]
        self._poll.unregister(file)
        caller.sock.close()

    def _meet(self, caller: _Caller) -> None:
        file = caller.sock.fileno()
        try:
            caller.read()
        except Exception as error:  # whatever it is, it is not the others'
            _complain(error)
            self._send_away(caller)
            return
        if caller.is_proven and file in self._strangers:
            self._guests[file] = self._strangers.pop(file)
        if caller.has_spoken:
            del self._guests[file]
            self._receive(Connection(caller.sock.detach()), caller.message)

    def _receive(self, connection: Connection, message: object) -> None:
        if isinstance(message, (Upload, Download)) and self._serve_file is not None:
            self._poll.unregister(connection)
            self._transfer(connection, message, self._serve_file)
            return
        self._agents[connection.fileno()] = _Agent(connection)
        with self._lock:
            self._known.add(connection)
        self._note(connection, message)

    # ---- agents

    def _hear(self, agent: _Agent) -> None:
        try:
            for message in agent.read():
                self._note(agent.connection, message)
        except Exception as error:  # whatever it is, it is not the other agents'
            _complain(error)
            self._poll.unregister(agent.connection)
            del self._agents[agent.connection.fileno()]
            self._events.put(("gone", agent.connection, None))

    def _note(self, connection: Connection, message: object) -> None:
        if isinstance(message, Reported) and is_piece(message.report) and self._keep_piece is not None:
            message = self._keep_piece(message)
        while self._events.qsize() >= MAX_WAITING and self._is_accepting:
            time.sleep(WAIT_INTERVAL)
        self._events.put(("message", connection, message))

    # ---- files

    def _transfer(self, connection: Connection, request: Upload | Download, serve: FileServer) -> None:
        def work() -> None:
            try:
                serve(connection, request)
            except Exception as error:  # whatever it is, the checkpoint is not here
                self._end_transfer(connection, request, error)
            else:
                self._end_transfer(connection, request, None)

        thread = threading.Thread(target=work, name="daskpytorch-file", daemon=True)
        with self._lock:
            self._transfers[connection] = thread
            if self._is_over:
                hang_up(connection)
        try:
            thread.start()
        except RuntimeError as error:  # the system gives this process no more threads for now
            self._end_transfer(connection, request, error)

    def _end_transfer(self, connection: Connection, request: Upload | Download, error: Exception | None) -> None:
        with self._lock:
            connection.close()
            del self._transfers[connection]
        if isinstance(request, Upload):
            self._events.put(("kept", request.file, error))


def _allow_files() -> None:
    """Raise the limit as far as this process may; many systems begin with 1024, which is 500 ranks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _complain(error: Exception) -> None:
    """Show what no connection's end explains."""
    if not isinstance(error, (EOFError, OSError)):
        with suppress(Exception):  # standard error may be closed, and this thread must go on
            traceback.print_exc()


class _Caller:
    """Somebody who has dialled in, until his first message is here. Waits for nothing, and takes not a byte more."""

    def __init__(self, sock: socket.socket, token: bytes) -> None:
        watch_peer(sock)
        self.sock = sock
        self.deadline = time.monotonic() + PATIENCE
        """On the monotonic clock."""
        self.is_proven = False
        self.has_spoken = False
        self.message: Any = None
        self._buffer = b""
        self._conversation = self._converse(token)
        self._wanted = next(self._conversation)

    def read(self) -> None:
        """Take in what has come; there must be something to read.

        Raises:
            EOFError: He has gone.
            ConnectionRefusedError: He is no agent of this gang.
        """
        data = self.sock.recv(self._wanted - len(self._buffer))
        if not data:
            raise EOFError
        self._buffer += data
        if len(self._buffer) == self._wanted:
            whole, self._buffer = self._buffer, b""
            try:
                self._wanted = self._conversation.send(whole)
            except StopIteration:
                self.has_spoken = True

    def _converse(self, token: bytes) -> Generator[int, bytes, None]:
        """Gives how many bytes are to come, and gets them."""
        challenge = handshake.challenge()
        self.sock.sendall(challenge)  # a few bytes into an empty buffer, which takes them at once
        self.sock.sendall(handshake.prove(token, challenge, (yield handshake.ANSWER_SIZE)))
        self.is_proven, self.deadline = True, time.monotonic() + FIRST_WORD_PATIENCE
        (size,) = struct.unpack("!i", (yield 4))
        if size == -1:  # 2 GiB or more
            (size,) = struct.unpack("!Q", (yield 8))
        self.message = pickle.loads((yield size))  # noqa: S301 - from our own agent, which has proved to be one


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
