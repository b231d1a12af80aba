"""The driver's ear: accepts agents and turns what they say into events."""

from __future__ import annotations

import pickle
import queue
import select
import socket
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice

from flytekitplugins.daskpytorch.driver.events import Beaten, Event, Gone, RankSaid, Said, Uploaded
from flytekitplugins.daskpytorch.driver.received import Part
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
PieceKeeper = Callable[[int, Piece], Part]
"""Keeps a piece of what a rank has submitted or returned."""
MAX_WAITING = 3000
"""Events that the supervisor has not taken yet; with so many waiting, agents are not heard, and ranks that report
faster than it takes things in wait until it has: memory is bounded. All that comes has to wait its turn anyway."""
MAX_REPORTS = 16
"""Of a rank in one of these: a message may have a thousand records, which take ten times its memory once opened."""
WAIT_INTERVAL = 0.005
MANY_AGENTS = 100
NAP = 0.01
"""Seconds after a turn in which so many agents had nothing to say but heartbeats: of thousands a second each would wake
this thread, which costs more than to read them."""
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
    """Accepts agents and turns what they say into events; its files and results are kept as they come.

    Each file travels in a thread of its own; all callers are met, and all agents heard, by a single one. Of many
    threads that have something to say at once, each would wake every 5 ms to ask for the interpreter.
    """

    def __init__(
        self,
        host: str,
        token: bytes,
        events: queue.SimpleQueue[Event],
        serve_file: FileServer,
        keep_piece: PieceKeeper,
    ) -> None:
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
        self._agents: dict[int, _Caller] = {}
        self._beats: dict[Connection, bytes] = {}
        """The newest of agents that have told of their ranks since ..."""
        self._beats_due: float | None = None
        """... and when the supervisor is told, on the monotonic clock."""
        self._is_calm = True
        """Nothing but heartbeats has come in this turn."""
        self._is_accepting = True
        self._accept_at: float | None = None
        """Not before, on the monotonic clock: there was no file for a caller."""
        self._is_pausing = False
        self._has_told_of_crowd = False
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
                connection.hang_up()
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
                self._is_calm = True
                for file, _ in self._poll.poll(self._patience()):
                    if (agent := self._agents.get(file)) is not None:
                        self._hear(agent)
                    elif file == self._server.fileno():
                        self._accept()
                    elif (caller := self._strangers.get(file) or self._guests.get(file)) is not None:
                        self._meet(caller)
                self._keep_time()
                if self._is_calm and len(self._agents) >= MANY_AGENTS:
                    time.sleep(NAP)
            self._shut()
        if self._is_over:
            self._close_known()

    def _patience(self) -> float | None:
        """How long nothing need be done unless somebody calls or speaks."""
        due = [next(iter(callers.values())).deadline for callers in (self._strangers, self._guests) if callers]
        due += [moment for moment in (self._accept_at, self._beats_due) if moment is not None]
        due += [oldest.room_at] if self._is_pausing and (oldest := self._oldest_of_crowd()) is not None else []
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _keep_time(self) -> None:
        now = time.monotonic()
        if self._beats_due is not None and self._beats_due <= now:
            self._events.put(Beaten(self._beats))
            self._beats, self._beats_due = {}, None
        for callers in (self._strangers, self._guests):
            while callers and (first := next(iter(callers.values()))).deadline <= now:
                self._send_away(first)
        if self._accept_at is not None and self._accept_at <= now:
            self._accept_at = None
        oldest = self._oldest_of_crowd()
        is_pausing = self._accept_at is not None or (oldest is not None and oldest.room_at > now)
        if is_pausing != self._is_pausing and self._server.fileno() >= 0:
            self._poll.modify(self._server, 0 if is_pausing else select.EPOLLIN)  # its end is noticed all the same
            self._is_pausing = is_pausing

    # ---- callers

    def _oldest_of_crowd(self) -> _Caller | None:
        """Who makes room for the next caller: of the address with most strangers the first; None: there is room."""
        if len(self._strangers) < MAX_STRANGERS:
            return None
        [(host, _)] = Counter(caller.host for caller in self._strangers.values()).most_common(1)
        return next(caller for caller in self._strangers.values() if caller.host == host)

    def _make_room(self) -> None:
        while (oldest := self._oldest_of_crowd()) is not None:
            if oldest.has_spoken():  # and waits to be heard
                self._meet(oldest)
                continue
            if not self._has_told_of_crowd:
                self._has_told_of_crowd = True
                say(
                    f"{len(self._strangers)} callers at {self.address[0]}:{self.address[1]}, many of them from "
                    f"{oldest.host}, have not proved to be agents of this gang; the oldest make room. Who else calls "
                    "this port: a scanner, a monitor, another gang's agents?"
                )
            self._send_away(oldest)

    def _accept(self) -> None:
        self._is_calm = False
        if not self._is_accepting:
            self._shut()
            return
        self._make_room()
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
        if self._server.fileno() >= 0:
            self._poll.unregister(self._server)
            self._server.close()
        for caller in (*self._strangers.values(), *self._guests.values()):
            self._send_away(caller)

    def _send_away(self, caller: _Caller) -> None:
        file = caller.connection.fileno()
        del (self._strangers if file in self._strangers else self._guests)[file]
        self._poll.unregister(file)
        caller.connection.close()

    def _meet(self, caller: _Caller) -> None:
        self._is_calm = False
        file = caller.connection.fileno()
        try:
            first_word = caller.read()
        except Exception as error:  # whatever it is, it is not the others'
            _complain(error)
            self._send_away(caller)
            return
        if caller.is_proven and file in self._strangers:
            self._guests[file] = self._strangers.pop(file)
        if first_word is not None:
            del self._guests[file]
            self._receive(caller, pickle.loads(first_word))  # noqa: S301 - from our own agent, which has proved to be one

    def _receive(self, caller: _Caller, message: FromAgent | Transfer) -> None:
        if isinstance(message, Transfer):
            self._poll.unregister(caller.connection)
            self._transfer(caller.connection, message)
            return
        self._agents[caller.connection.fileno()] = caller
        with self._lock:
            self._known.add(caller.connection)
        self._note(caller.connection, message)

    # ---- agents

    def _hear(self, agent: _Caller) -> None:
        try:
            for frame in agent.frames.take(agent.connection.read(READ_SIZE)):
                if heartbeat.is_heartbeat(frame):
                    self._note_beat(agent.connection, frame)
                else:
                    self._note(agent.connection, pickle.loads(frame))  # noqa: S301 - it has proved to be our own agent
        except Exception as error:  # whatever it is, it is not the other agents'
            _complain(error)
            self._poll.unregister(agent.connection)
            del self._agents[agent.connection.fileno()]
            self._beats.pop(agent.connection, None)
            self._events.put(Gone(agent.connection))
            self._is_calm = False

    def _note_beat(self, connection: Connection, beat: bytes) -> None:
        """Keep it for a moment; one that tells of no rank has told all by having come."""
        if len(beat) > len(heartbeat.MARK):
            self._beats[connection] = beat
            self._beats_due = self._beats_due or time.monotonic() + BEAT_INTERVAL

    def _note(self, connection: Connection, message: FromAgent) -> None:
        self._is_calm = False
        if (beat := self._beats.pop(connection, None)) is not None:  # it came before, and may be an older attempt's
            self._events.put(Beaten({connection: beat}))
        for event in self._events_of(connection, message):
            while self._events.qsize() >= MAX_WAITING and self._is_accepting:
                time.sleep(WAIT_INTERVAL)
            self._events.put(event)

    def _events_of(self, connection: Connection, message: FromAgent) -> Iterator[Said | RankSaid]:
        if not isinstance(message, Reported):
            yield Said(connection, message)
            return
        rank, reports = message.rank, unpack(message.reports)
        while several := list(islice(reports, MAX_REPORTS)):
            kept = [self._keep_piece(rank, report) if isinstance(report, Piece) else report for report in several]
            yield RankSaid(connection, rank, kept)

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
            self._events.put(Uploaded(request.file, error))


def _complain(error: Exception) -> None:
    """Show what no connection's end explains."""
    if not isinstance(error, (EOFError, OSError)):
        with suppress(Exception):  # standard error may be closed, and this thread must go on
            traceback.print_exc()


class _Caller:
    """Somebody who has dialled in. Waits for nothing and, until his first word is here, takes not a byte more."""

    def __init__(self, sock: socket.socket, token: bytes) -> None:
        watch_peer(sock)
        self.connection = Connection(sock)
        self.frames = Frames(only=handshake.ANSWER_SIZE)
        self.host = str(sock.getpeername()[0])
        self.deadline = time.monotonic() + PATIENCE
        """On the monotonic clock, ..."""
        self.room_at = time.monotonic() + GRACE
        """... as is this: when he may have to make room."""
        self.is_proven = False
        self._token = token
        self._challenge = handshake.challenge()
        self.connection.send_frame(self._challenge)  # a few bytes into an empty buffer, which takes them at once

    def has_spoken(self) -> bool:
        """Whether something has come that was not read, or he has gone."""
        poll = select.poll()  # `select` takes no file above 1,024
        poll.register(self.connection, select.POLLIN)
        return bool(poll.poll(0))

    def read(self) -> bytes | None:
        """Take in what has come, of which there must be something; his first word, once it is whole.

        Raises:
            EOFError: He has gone.
            ConnectionRefusedError: He is no agent of this gang.
        """
        frame = next(self.frames.take(self.connection.read(self.frames.wanted)), None)
        if frame is None or self.is_proven:
            return frame
        self.connection.send_frame(handshake.prove(self._token, self._challenge, frame))
        self.is_proven, self.frames.only, self.deadline = True, None, time.monotonic() + FIRST_WORD_PATIENCE
        return None
