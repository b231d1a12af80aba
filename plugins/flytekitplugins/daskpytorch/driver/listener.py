"""The driver's ear: accepts agents, and passes on what they say as calls for the gang's thread."""

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
from collections import Counter
from collections.abc import Callable, Iterator

from flytekitplugins.daskpytorch.driver.agents import Call
from flytekitplugins.daskpytorch.driver.state import GangState
from flytekitplugins.daskpytorch.process.log import say
from flytekitplugins.daskpytorch.protocol import handshake, heartbeat
from flytekitplugins.daskpytorch.protocol.failure import raisable
from flytekitplugins.daskpytorch.protocol.framing import READ_SIZE, Connection, Frames, watch_peer
from flytekitplugins.daskpytorch.protocol.messages import Download, DownloadLarge, FromAgent, Reported, Upload
from flytekitplugins.daskpytorch.protocol.reports import unpack
from flytekitplugins.daskpytorch.protocol.result_frames import Piece

Transfer = Upload | Download | DownloadLarge
FileServer = Callable[[Connection, Transfer], None]
"""Sends or receives a checkpoint, or what is large in a call, over a connection."""
MAX_WAITING = 3000
"""Calls that the supervisor has not made yet. With so many waiting, agents are not heard, and ranks that report faster
than it takes things in wait until it has: memory is bounded. All that comes has to wait its turn anyway."""
MAX_REPORTS = 16
"""Of a rank in one call: a message may have a thousand records, which take ten times its memory once opened."""
WAIT_INTERVAL = 0.005
MANY_AGENTS = 100
NAP = 0.01
"""Seconds to sleep after heartbeats of so many agents: of thousands a second each would wake this thread, which costs
more than to read them."""
BEAT_INTERVAL = 0.05
"""Seconds in which heartbeats are gathered: one by one, each would wake the supervisor."""
MAX_STRANGERS = 256
"""Callers that have not proved themselves; others wait in the kernel's queue, as they do not use up our files."""
PATIENCE = 20.0
"""Seconds for a stranger to prove that he is an agent, ..."""
GRACE = 1.0
"""... and those after which the oldest makes room for others, of the address that has most of the places."""
FIRST_WORD_PATIENCE = 120.0
"""Seconds for an agent's first word: to learn of a node's GPUs, torch is imported in a process of its own."""
ACCEPT_PAUSE = 0.2
"""Seconds until callers are accepted again, where this process has no files or no memory for them."""
END_TIME = 5.0
"""Seconds for the threads to end, once all callers are hung up on."""


class Listener:
    """Accepts agents and passes on what they say; files and results are kept as they come.

    Each file travels in a thread of its own. One thread meets all callers and hears all agents: of many threads that
    have something to say at once, each would wake every 5 ms to ask for the interpreter.
    """

    _state: GangState
    _loop: asyncio.AbstractEventLoop

    def __init__(
        self,
        host: str,
        token: bytes,
        calls: queue.SimpleQueue[Call],
        serve_file: FileServer,
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # Of agents that dial at once, those beyond the backlog would try again a second later.
        self._server = socket.create_server((host, 0), family=family, backlog=socket.SOMAXCONN)
        self._server.setblocking(False)  # a caller may have gone again
        self.address: tuple[str, int] = self._server.getsockname()[:2]
        """Host and port to dial."""
        self._token = token
        self._calls = calls
        self._serve_file = serve_file
        self._strangers: dict[asyncio.Task[None], tuple[str, float]] = {}
        """Callers that have not proved themselves, the oldest first: host, and when the caller may have to make room"""
        self._guests: set[asyncio.Task[None]] = set()
        """Callers that have proved themselves, and not said who they are."""
        self._agents: set[Connection] = set()
        self._beats: dict[Connection, bytes] = {}
        """The newest heartbeats that the supervisor has yet to be told of."""
        self._is_napping = False
        self._is_calm = True
        """Nothing but heartbeats has come since the last nap."""
        self._has_told_of_crowd = False
        self._is_closing = False
        self._is_closed = asyncio.Event()
        self._has_changed = asyncio.Event()
        """An agent has gone."""
        self._is_over = False
        self._known: list[Connection] = []
        """Connections of agents, also of such that have gone: whoever makes the calls closes them."""
        self._lock = threading.Lock()
        """No transfer's connection is closed while it is hung up on: its descriptor may be another file's by then."""
        self._transfers: dict[Connection, threading.Thread] = {}
        self._thread = threading.Thread(target=self._run, name="daskpytorch-listener", daemon=True)

    def listen(self, state: GangState) -> None:
        """Accept agents from now on; whoever makes the calls has this state hear what they say."""
        self._state = state
        # Not a loop of uvloop, which would make the sockets non-blocking that the gang's thread sends by.
        self._loop = asyncio.SelectorEventLoop()
        self._thread.start()

    def close(self) -> None:
        """Accept no more, and hang up on callers that have not said who they are; agents and transfers stay."""
        self._is_closing = True
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._is_closed.set)

    def dismiss(self, farewell: object, seconds: float) -> None:
        """Accept no more, bid all agents farewell, and wait so many seconds at most until they have hung up.

        For the thread that sends to agents, once it makes no more calls.
        """
        self.close()
        for connection in list(self._known):
            with contextlib.suppress(OSError):  # it has gone, or been given up
                connection.send(farewell)
        self._thread.join(seconds)

    def end(self) -> None:
        """Hang up on all that are left, and wait until no thread and no open file is.

        For when nobody sends to an agent any more, or makes a call.
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
        if not self._thread.is_alive():  # else it does so itself, as soon as a slow disk lets go of it
            self._close_known()

    def _close_known(self) -> None:
        for connection in list(self._known):
            connection.close()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._live())
        finally:
            self._loop.close()
        if self._is_over:
            self._close_known()

    async def _live(self) -> None:
        """Accept callers until this is closed, and hear agents until the last one has gone."""
        accepting = self._loop.create_task(self._accept())
        await self._is_closed.wait()
        meeting = [accepting, *self._strangers, *self._guests]
        for task in meeting:
            task.cancel()
        await asyncio.wait(meeting)
        self._server.close()
        while self._agents:
            self._has_changed.clear()
            await self._has_changed.wait()

    # ---- callers

    async def _accept(self) -> None:
        while True:
            await self._make_room()
            try:
                sock, address = await self._loop.sock_accept(self._server)
            except OSError:  # the caller has gone again; or there may be files and memory again in a while
                await asyncio.sleep(ACCEPT_PAUSE)
                continue
            stranger = self._loop.create_task(self._meet(sock))
            self._strangers[stranger] = str(address[0]), time.monotonic() + GRACE
            stranger.add_done_callback(self._strangers.pop)

    async def _make_room(self) -> None:
        """Wait for a place, or have the oldest stranger make room, of the address that has most of the places."""
        while len(self._strangers) >= MAX_STRANGERS:
            [(crowded, _)] = Counter(host for host, _ in self._strangers.values()).most_common(1)
            oldest, room_at = next((task, at) for task, (host, at) in self._strangers.items() if host == crowded)
            # Even with a timeout of 0, what strangers have sent by now is read.
            patience = max(0.0, room_at - time.monotonic())
            done, _ = await asyncio.wait(self._strangers, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            if done:
                continue
            if not self._has_told_of_crowd:
                self._has_told_of_crowd = True
                say(
                    f"{len(self._strangers)} callers at {self.address[0]}:{self.address[1]}, many of them from "
                    f"{crowded}, have not proved to be agents of this gang; the oldest make room. Who else calls "
                    "this port: a scanner, a monitor, another gang's agents?"
                )
            oldest.cancel()
            await asyncio.wait([oldest])

    async def _meet(self, sock: socket.socket) -> None:
        """Let a caller prove that he is an agent of this gang. Until then, not a byte more is taken than that needs."""
        with _closed_on_failure(sock):
            async with asyncio.timeout(PATIENCE):
                watch_peer(sock)
                connection, challenge = Connection(sock), handshake.challenge()
                connection.send_frame(challenge)  # a few bytes into an empty buffer, which takes them at once
                answer = await self._frame(sock, Frames(only=handshake.ANSWER_SIZE))
                connection.send_frame(handshake.prove(self._token, challenge, answer))
            guest = self._loop.create_task(self._greet(sock, connection))
            self._guests.add(guest)
            guest.add_done_callback(self._guests.discard)

    async def _greet(self, sock: socket.socket, connection: Connection) -> None:
        """Hear the first word of an agent, which says what the connection is for."""
        with _closed_on_failure(sock):
            async with asyncio.timeout(FIRST_WORD_PATIENCE):
                first_word = await self._frame(sock, Frames())
            message = pickle.loads(first_word)  # noqa: S301 - from our own agent, which has proved to be one
            sock.setblocking(True)
            if isinstance(message, Transfer):
                self._transfer(connection, message)
            else:
                self._take_in(connection, message)

    async def _frame(self, sock: socket.socket, frames: Frames) -> bytes:
        """Return the next frame, and leave in the socket what follows it."""
        while True:
            for frame in frames.take(await self._loop.sock_recv(sock, frames.wanted)):
                return frame

    # ---- agents

    def _take_in(self, connection: Connection, message: FromAgent) -> None:
        self._known.append(connection)
        if self._is_over:
            connection.hang_up()
        self._agents.add(connection)
        self._loop.add_reader(connection.fileno(), self._hear, connection, Frames())
        self._note(connection, message)

    def _hear(self, connection: Connection, frames: Frames) -> None:
        try:
            for frame in frames.take(connection.read(READ_SIZE)):
                if heartbeat.is_heartbeat(frame):
                    self._note_beat(connection, frame)
                else:
                    self._note(connection, pickle.loads(frame))  # noqa: S301 - it has proved to be our own agent
        except Exception as error:  # whatever it is, it is not the other agents'
            _complain(error)
            self._loop.remove_reader(connection.fileno())
            self._agents.discard(connection)
            self._beats.pop(connection, None)
            self._calls.put(functools.partial(self._state.note_end, connection))
            self._has_changed.set()

    def _note_beat(self, connection: Connection, beat: bytes) -> None:
        """Keep a heartbeat for a moment; one that tells of no rank has told all by having come."""
        if len(beat) > len(heartbeat.MARK):
            if not self._beats:
                self._loop.call_later(BEAT_INTERVAL, self._tell_beats)
            self._beats[connection] = beat
        if not self._is_napping and len(self._agents) >= MANY_AGENTS:
            self._is_napping = True
            self._loop.call_soon(self._nap)

    def _nap(self) -> None:
        if self._is_calm:
            time.sleep(NAP)
        self._is_napping, self._is_calm = False, True

    def _tell_beats(self) -> None:
        if self._beats:
            self._calls.put(functools.partial(self._state.hear_beats, self._beats))
            self._beats = {}

    def _note(self, connection: Connection, message: FromAgent) -> None:
        self._is_calm = False
        if (beat := self._beats.pop(connection, None)) is not None:  # it came before, and may be an older attempt's
            self._calls.put(functools.partial(self._state.hear_beats, {connection: beat}))
        for call in self._calls_for(connection, message):
            while self._calls.qsize() >= MAX_WAITING and not self._is_closing:
                time.sleep(WAIT_INTERVAL)
            self._calls.put(call)

    def _calls_for(self, connection: Connection, message: FromAgent) -> Iterator[Call]:
        if not isinstance(message, Reported):
            yield functools.partial(self._state.hear, connection, message)
            return
        rank, reports = message.rank, unpack(message.reports)
        while several := list(itertools.islice(reports, MAX_REPORTS)):
            kept = [self._state.received.keep(rank, it) if isinstance(it, Piece) else it for it in several]
            yield functools.partial(self._state.hear_of_rank, connection, rank, kept)

    # ---- files

    def _transfer(self, connection: Connection, request: Transfer) -> None:
        def work() -> None:
            try:
                self._serve_file(connection, request)
            except BaseException as error:  # whatever it is, the checkpoint is not here
                self._end_transfer(connection, request, raisable(error, "the transfer"))
            else:
                self._end_transfer(connection, request, None)

        thread = threading.Thread(target=work, name="daskpytorch-file", daemon=True)
        with self._lock:
            self._transfers[connection] = thread
            if self._is_over:
                connection.hang_up()
        try:
            thread.start()
        except RuntimeError as error:  # the system gives this process no more threads for now
            self._end_transfer(connection, request, error)

    def _end_transfer(self, connection: Connection, request: Transfer, error: Exception | None) -> None:
        with self._lock:
            connection.close()
            del self._transfers[connection]
        if isinstance(request, Upload):
            self._calls.put(functools.partial(self._state.note_upload, request.file, error))


@contextlib.contextmanager
def _closed_on_failure(sock: socket.socket) -> Iterator[None]:
    """Hang up on a caller with whom anything goes wrong; whatever it is, it is not the others'."""
    try:
        yield
    except BaseException as error:
        sock.close()
        _complain(error)
        if not isinstance(error, Exception):
            raise


def _complain(error: BaseException) -> None:
    """Show what no connection's end explains."""
    if not isinstance(error, (EOFError, OSError, asyncio.CancelledError)):
        with contextlib.suppress(Exception):  # standard error may be closed, and this thread must go on
            traceback.print_exc()
