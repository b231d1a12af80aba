"""The driver's server, which accepts agents, and turns messages into calls for the gang's thread."""

import asyncio
import contextlib
import functools
import itertools
import pickle
import queue
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator

from flytekitplugins.daskpytorch.driver.agents import Action
from flytekitplugins.daskpytorch.driver.state import GangState
from flytekitplugins.daskpytorch.protocol import framing
from flytekitplugins.daskpytorch.protocol.framing import READ_SIZE, Connection, Frames, watch_peer
from flytekitplugins.daskpytorch.protocol.messages import Download, FromAgent, Reported, Upload, unpack
from flytekitplugins.daskpytorch.protocol.payload import Piece

Transfer = Upload | Download
FileServer = Callable[[Connection, Transfer], None]
MAX_WAITING = 3000
"""Calls in the gang's queue at which the listener stops reading from agents.

Bounds the driver's memory: ranks that report faster than the gang's thread works must wait.
"""
MAX_REPORTS = 16
"""A rank's reports per queued call, as a message may hold 1000 log records, which take ten times its memory
unpickled."""
WAIT_INTERVAL = 0.005
MAX_UNAUTHENTICATED = 256
"""Further callers wait in the kernel's queue, without a descriptor in the driver."""
AUTHENTICATION_TIMEOUT = 20.0
FIRST_MESSAGE_TIMEOUT = 120.0
ACCEPT_PAUSE = 0.2
"""Seconds after an error while accepting callers, such as too many open files."""
END_TIME = 5.0


class Listener:
    """Accepts agents, turns their messages into calls for the gang's thread, and stores files and results on arrival.

    One thread reads from all agents: of one thread per agent, each would wake every 5 ms to request the GIL.
    """

    _state: GangState
    _loop: asyncio.AbstractEventLoop

    def __init__(
        self,
        host: str,
        token: bytes,
        calls: queue.SimpleQueue[Action],
        serve_file: FileServer,
    ) -> None:
        self._server = framing.listen_at(host)
        self._server.setblocking(False)  # `accept` must not block after a caller has gone
        self.address: tuple[str, int] = self._server.getsockname()[:2]
        self._token = token
        self._calls = calls
        self._serve_file = serve_file
        self._room = asyncio.Semaphore(MAX_UNAUTHENTICATED)
        self._callers: set[asyncio.Task[None]] = set()
        self._agents: set[Connection] = set()
        self._is_closing = False
        self._is_closed = asyncio.Event()
        self._has_changed = asyncio.Event()
        self._is_over = False
        self._known: list[Connection] = []
        """Connections of all current and past agents. The gang's thread closes ended ones."""
        self._lock = threading.Lock()
        """Held while a transfer's connection is shut down or closed, as another file may then get its descriptor."""
        self._transfers: dict[Connection, threading.Thread] = {}
        self._thread = threading.Thread(target=self._run, name="daskpytorch-listener", daemon=True)

    def listen(self, state: GangState) -> None:
        self._state = state
        # A selector loop: uvloop would make the sockets non-blocking, through which the gang's thread sends.
        self._loop = asyncio.SelectorEventLoop()
        self._thread.start()

    def close(self) -> None:
        """Stop accepting callers, and close connections that have sent no first message. Agents and transfers stay."""
        self._is_closing = True
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._is_closed.set)

    def dismiss(self, farewell: object, seconds: float) -> None:
        """Send all agents a last message, and wait up to `seconds` until they close their connections.

        Only the gang's thread may call this method, after its last queued call.
        """
        self.close()
        for connection in list(self._known):
            with contextlib.suppress(OSError):  # the agent has gone
                connection.send(farewell)
        self._thread.join(seconds)

    def end(self) -> None:
        """Shut down all connections, wait for threads, then close the connections of ended threads.

        Call this after the last message to agents, when the gang's thread has handled all agents' messages.
        """
        self.close()
        self._is_over = True
        with self._lock:
            for connection in (*self._known, *self._transfers):
                connection.hang_up()
        deadline = time.monotonic() + END_TIME
        self._thread.join(END_TIME)
        for thread in list(self._transfers.values()):
            thread.join(max(0.0, deadline - time.monotonic()))
        if not self._thread.is_alive():  # a thread that still reads could meet the next file of the same descriptor
            for connection in self._known:
                connection.close()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._live())
        finally:
            self._loop.close()

    async def _live(self) -> None:
        accepting = self._loop.create_task(self._accept())
        await self._is_closed.wait()
        # The shutdown ends `_accept` by an error. A cancelled `sock_accept` may have accepted a caller, and forgets it.
        self._server.shutdown(socket.SHUT_RDWR)
        self._room.release()  # `_accept` may wait for room
        while not accepting.done() or self._callers:
            for caller in self._callers:
                caller.cancel()
            await asyncio.wait([accepting, *self._callers], return_when=asyncio.FIRST_COMPLETED)
        self._server.close()
        while self._agents:
            self._has_changed.clear()
            await self._has_changed.wait()

    # ---- callers

    async def _accept(self) -> None:
        while not self._is_closing:
            await self._room.acquire()
            try:
                sock, _ = await self._loop.sock_accept(self._server)
            except OSError:  # the listener closes, the caller has gone, or descriptors or memory are short
                self._room.release()
                await asyncio.sleep(0 if self._is_closing else ACCEPT_PAUSE)
                continue
            caller = self._loop.create_task(self._meet(sock))
            self._callers.add(caller)
            caller.add_done_callback(functools.partial(self._note_met, sock))

    def _note_met(self, sock: socket.socket, caller: asyncio.Task[None]) -> None:
        self._callers.discard(caller)
        error = None if caller.cancelled() else caller.exception()
        if error is not None:
            _complain(error)
        if error is not None or caller.cancelled():
            sock.close()

    async def _meet(self, sock: socket.socket) -> None:
        try:
            async with asyncio.timeout(AUTHENTICATION_TIMEOUT):
                connection = await self._authenticate(sock)
        finally:
            self._room.release()
        async with asyncio.timeout(FIRST_MESSAGE_TIMEOUT):
            first_message = await self._frame(sock, Frames())
        message = pickle.loads(first_message)  # noqa: S301 - from our own agent, which has proved to be one
        sock.setblocking(True)
        if isinstance(message, Transfer):
            self._transfer(connection, message)
        else:
            self._take_in(connection, message)

    async def _authenticate(self, sock: socket.socket) -> Connection:
        """Read only the handshake's bytes."""
        watch_peer(sock)
        connection, challenge = Connection(sock), framing.challenge()
        connection.send_frame(challenge)  # cannot block: a few bytes into an empty send buffer
        answer = await self._frame(sock, Frames(only=framing.ANSWER_SIZE))
        connection.send_frame(framing.prove(self._token, challenge, answer))
        return connection

    async def _frame(self, sock: socket.socket, frames: Frames) -> bytes:
        while True:
            for frame in frames.take(await self._loop.sock_recv(sock, frames.wanted)):
                return frame

    # ---- agents

    def _take_in(self, connection: Connection, message: FromAgent) -> None:
        self._agents.add(connection)
        self._known.append(connection)
        if self._is_over:
            connection.hang_up()
        self._loop.add_reader(connection.fileno(), self._hear, connection, Frames())
        self._note(connection, message)

    def _hear(self, connection: Connection, frames: Frames) -> None:
        try:
            for frame in frames.take(connection.read(READ_SIZE)):
                if framing.is_heartbeat(frame):
                    self._calls.put(functools.partial(self._state.note_beat, connection, frame))
                else:
                    self._note(connection, pickle.loads(frame))  # noqa: S301 - it has proved to be our own agent
        except Exception as error:  # other agents' connections must survive this error
            _complain(error)
            self._loop.remove_reader(connection.fileno())
            self._agents.discard(connection)
            self._calls.put(functools.partial(self._state.note_end, connection))
            self._has_changed.set()

    def _note(self, connection: Connection, message: FromAgent) -> None:
        for call in self._calls_for(connection, message):
            while self._calls.qsize() >= MAX_WAITING and not self._is_closing:
                time.sleep(WAIT_INTERVAL)
            self._calls.put(call)

    def _calls_for(self, connection: Connection, message: FromAgent) -> Iterator[Action]:
        if not isinstance(message, Reported):
            yield functools.partial(self._state.hear, connection, message)
            return
        rank, reports = message.rank, iter(unpack(message.report))
        while several := list(itertools.islice(reports, MAX_REPORTS)):
            kept = [self._state.received.keep(rank, it) if isinstance(it, Piece) else it for it in several]
            yield functools.partial(self._state.hear_of_rank, connection, rank, kept)

    # ---- files

    def _transfer(self, connection: Connection, request: Transfer) -> None:
        def work() -> None:
            try:
                self._serve_file(connection, request)
            except Exception as error:  # the rank notices the connection's end
                _complain(error)
            finally:
                self._end_transfer(connection)

        thread = threading.Thread(target=work, name="daskpytorch-file", daemon=True)
        with self._lock:
            self._transfers[connection] = thread
            if self._is_over:
                connection.hang_up()
        try:
            thread.start()
        except RuntimeError:  # the system refuses further threads for now
            self._end_transfer(connection)

    def _end_transfer(self, connection: Connection) -> None:
        with self._lock:
            connection.close()
            del self._transfers[connection]


def _complain(error: BaseException) -> None:
    if not isinstance(error, (EOFError, OSError)):
        with contextlib.suppress(Exception):  # a closed standard error must not end this thread
            traceback.print_exception(error)
