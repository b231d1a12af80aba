"""The driver's server: one thread for each agent, which turns messages into calls for the gang's thread."""

import contextlib
import functools
import queue
import socket
import threading
import time
import traceback
from collections.abc import Callable, Collection

from flytekitplugins.daskpytorch.driver.agents import Action
from flytekitplugins.daskpytorch.driver.state import GangState
from flytekitplugins.daskpytorch.protocol import framing
from flytekitplugins.daskpytorch.protocol.framing import Connection
from flytekitplugins.daskpytorch.protocol.messages import Beat, Download, FromAgent, Piece, Reported, Upload, unpack

Transfer = Upload | Download
FileServer = Callable[[Connection, Transfer], None]
MAX_WAITING = 100
"""Messages in the gang's queue, before agents must wait. Bounds the driver's memory: one may hold 1000 log records."""
MAX_UNAUTHENTICATED = 256
"""Further callers wait in the kernel's queue, without a descriptor or thread in the driver."""
AUTHENTICATION_TIMEOUT = 20.0
ACCEPT_PAUSE = 0.2
"""Seconds after an error while accepting callers, such as too many open files."""
END_TIME = 5.0


class Listener:
    """Turns agents' messages into calls for the gang's thread. Stores files and results on arrival."""

    _state: GangState

    def __init__(self, host: str, token: bytes, calls: queue.SimpleQueue[Action], serve_file: FileServer) -> None:
        self._server = framing.listen_at(host)
        self.address: tuple[str, int] = self._server.getsockname()[:2]
        self._token = token
        self._calls = calls
        self._serve_file = serve_file
        self._room = threading.Semaphore(MAX_UNAUTHENTICATED)
        self._places = threading.Semaphore(MAX_WAITING)
        self.beats: dict[Connection, Beat] = {}
        """Newest heartbeats. They wake nobody: they only move deadlines back."""
        self._is_closing = False
        self._is_over = False
        self._lock = threading.Lock()
        """Held while a connection is shut down or closed, as another file may then get its descriptor."""
        self._callers: dict[Connection, threading.Thread] = {}
        self._agents: list[Connection] = []
        """All current and past ones. The gang's thread, which sends to agents, closes ended ones."""
        self._thread = threading.Thread(target=self._accept, name="daskpytorch-listener", daemon=True)

    def listen(self, state: GangState) -> None:
        self._state = state
        self._thread.start()

    def close(self) -> None:
        """Stop accepting callers. Connections stay."""
        self._is_closing = True
        self._places.release(len(self._callers) + 1)  # nobody may take further calls
        with contextlib.suppress(OSError):  # closed before
            self._server.shutdown(socket.SHUT_RDWR)

    def dismiss(self, farewell: object, seconds: float) -> None:
        """Send all agents a last message, and wait up to `seconds` until they close their connections.

        Only the gang's thread may call this method, after its last queued call.
        """
        self.close()
        for connection in list(self._agents):
            with contextlib.suppress(OSError):  # the agent has gone
                connection.send(farewell)
        self._join(self._agents, seconds)

    def end(self) -> None:
        """Shut down all connections, wait for threads, then close the connections of ended threads.

        Call this after the last message to agents, when the gang's thread has handled all agents' messages.
        """
        self.close()
        with self._lock:
            self._is_over = True
            for connection in self._callers:
                connection.hang_up()
        self._thread.join(END_TIME)
        self._join(self._callers, END_TIME)
        for connection in self._agents:
            if not self._callers[connection].is_alive():  # a read could meet the next file of the same descriptor
                connection.close()

    def _join(self, connections: Collection[Connection], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        with self._lock:
            threads = [self._callers[connection] for connection in connections]
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    # ---- callers

    def _accept(self) -> None:
        with self._server:
            while not self._is_closing:
                self._room.acquire()
                try:
                    sock, _ = self._server.accept()
                    framing.watch_peer(sock)
                except OSError:  # the listener closes, the caller has gone, or descriptors or memory are short
                    self._room.release()
                    time.sleep(0 if self._is_closing else ACCEPT_PAUSE)
                    continue
                self._begin(Connection(sock))

    def _begin(self, connection: Connection) -> None:
        thread = threading.Thread(target=self._serve, args=[connection], name="daskpytorch-caller", daemon=True)
        with self._lock:
            self._callers[connection] = thread
            if self._is_over:
                connection.hang_up()
        try:
            thread.start()
        except RuntimeError:  # the system refuses further threads for now
            self._room.release()
            self._forget(connection)

    def _serve(self, connection: Connection) -> None:
        try:
            try:
                framing.meet(connection, self._token, time.monotonic() + AUTHENTICATION_TIMEOUT)
            finally:
                self._room.release()
            message: FromAgent | Transfer = connection.recv()
            if isinstance(message, Transfer):
                self._serve_file(connection, message)
            else:
                self._hear(connection, message)
        except Exception as error:  # ends this connection alone
            if not isinstance(error, (EOFError, OSError)):
                with contextlib.suppress(Exception):  # standard error is closed
                    traceback.print_exception(error)
        finally:
            if connection in self._agents:
                self._calls.put(functools.partial(self._state.note_end, connection))
            else:
                self._forget(connection)

    def _forget(self, connection: Connection) -> None:
        with self._lock:
            connection.close()
            del self._callers[connection]

    # ---- agents

    def _hear(self, connection: Connection, message: FromAgent) -> None:
        self._agents.append(connection)
        self._note(connection, message)
        while True:
            message = connection.recv()
            if isinstance(message, Beat):
                self.beats[connection] = message
            else:
                self._note(connection, message)

    def _note(self, connection: Connection, message: FromAgent) -> None:
        call = functools.partial(self._state.hear, connection, message)
        if isinstance(message, Reported):
            rank, reports = message.rank, unpack(message.report)
            kept = [self._state.received.keep(rank, it) if isinstance(it, Piece) else it for it in reports]
            call = functools.partial(self._state.hear_of_rank, connection, rank, kept)
        if not self._is_closing:
            self._places.acquire()
        self._calls.put(functools.partial(self._take, call))

    def _take(self, call: Action) -> object:
        self._places.release()
        return call()
