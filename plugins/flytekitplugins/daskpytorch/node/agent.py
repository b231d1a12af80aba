"""Starts, watches and kills the ranks of one node; the driver does the thinking. Knows no Dask.

Runs in a thread of a Dask worker (or of the task's own process) for as long as the gang lives. It dials the driver,
says what its node has, and then relays: orders to the ranks; their reports, output and exits to the driver.
"""

import codecs
import contextlib
import functools
import os
import select
import signal
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection as Channel
from multiprocessing.connection import Pipe, wait
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import assert_never

from flytekitplugins.daskpytorch.node import fork_client, fork_server
from flytekitplugins.daskpytorch.node.hardware import describe_node, interface_of, num_kills_for_memory
from flytekitplugins.daskpytorch.process.scratch import scratch_folder
from flytekitplugins.daskpytorch.protocol import heartbeat, messages, orders, reports
from flytekitplugins.daskpytorch.protocol.checkpoint_file import CheckpointFile, digest_of, link_file, take_file
from flytekitplugins.daskpytorch.protocol.code import place_code
from flytekitplugins.daskpytorch.protocol.failure import is_of_watchdog
from flytekitplugins.daskpytorch.protocol.framing import Connection, watch_peer
from flytekitplugins.daskpytorch.protocol.handshake import introduce
from flytekitplugins.daskpytorch.protocol.messages import AgentOrder
from flytekitplugins.daskpytorch.protocol.orders import RankOrder
from flytekitplugins.daskpytorch.protocol.placement import Node, Place
from flytekitplugins.daskpytorch.protocol.segments import Address, SharedMemory
from flytekitplugins.daskpytorch.protocol.sharded import modules_for
from flytekitplugins.daskpytorch.protocol.worker_data import WorkerData

HEARTBEAT_INTERVAL = 1.0
"""Seconds between heartbeats."""
MAX_HEARTBEATS = 5_000
"""A second, of all of a gang's agents together: of more than so many each beats less often, but ..."""
MAX_HEARTBEAT_INTERVAL = 3.0
"""... five times within the silence after which it would count as lost."""
DUMP_TIME = 0.3
"""Seconds for ranks that do not answer to write down their stacks in a signal handler."""
NUM_FILES_KEPT = 3
"""How many checkpoints stay on this node, so that a restart here need not fetch them."""
TAIL_LINES = 40
"""How much of a rank's log goes into an error, at most."""
TAIL_SIZE = 16 << 10
"""Characters of a rank's log that go into an error, at most."""
MAX_LINE = 64 << 10
"""Characters; what a rank writes without an end of the line goes on in pieces of this size."""
REDIAL_WAITS = (0.1, 0.3, 1.0, 2.0, 4.0)
"""Seconds before the driver is called again that has hung up."""
DIAL_TIMEOUT = 30.0
DIAL_WAITS = (0.5, 1.0, 2.0)
"""Seconds between attempts to reach the driver with a checkpoint."""


def run(
    order: AgentOrder,
    leaving: int | None = None,
    data: WorkerData | None = None,
    *,
    start_method: str = "forkserver",
) -> None:
    """Serve the driver until the gang is over, or the driver is gone; then no rank is left.

    Args:
        order: Where the driver is.
        leaving: A file descriptor that becomes readable when this process is told to end.
        data: The ranks' way to what the worker here holds.
        start_method: How ranks are started; see `fork_client.connect`.

    Raises:
        ConnectionError: The driver cannot be reached from here.
    """
    with (
        contextlib.ExitStack() as at_last,
        scratch_folder("daskpytorch-") as scratch,
        contextlib.closing(_Agent(order, scratch, leaving, data, start_method)) as agent,
    ):
        agent.fork_ahead(order.num_ranks)
        connection = dial(order)
        at_last.callback(connection.close)  # its end tells the driver that nothing is left here
        try:
            agent.serve(connection)
        except (EOFError, ConnectionError):  # the driver has gone, or the fork server with all ranks
            return
        except Exception:
            with contextlib.suppress(OSError):  # the driver has gone, too
                connection.send(messages.Broken(traceback.format_exc()))
            raise


class _Lines:
    """Makes lines of a stream, in a time that grows with its length alone, and with a bound on what it holds."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._unfinished: list[str] = []
        """The pieces of a line without its end."""
        self._size = 0

    def feed(self, data: bytes) -> list[str]:
        """The lines that end in these bytes, of which those that are not blank count; no bytes are the stream's end."""
        # A carriage return ends a line too: each state of a progress bar is one.
        first, *others = self._decoder.decode(data, final=not data).replace("\r", "\n").split("\n")
        lines = []
        self._add(first)
        for start in others:
            lines.append(self._finish())
            self._add(start)
        if not data or self._size >= MAX_LINE:
            lines.append(self._finish())
        return [line[at : at + MAX_LINE] for line in lines if line.strip() for at in range(0, len(line), MAX_LINE)]

    def _add(self, piece: str) -> None:
        self._unfinished.append(piece)
        self._size += len(piece)

    def _finish(self) -> str:
        line = "".join(self._unfinished)
        self._unfinished, self._size = [], 0
        return line


@dataclass
class _Rank:
    key: int
    """Its name at the fork server: the local rank."""
    channel: Channel
    output: int | None
    """Read end of its standard output and error; None once it has closed them."""
    place: Place | None = None
    """None while it waits for its orders."""
    lines: _Lines = field(default_factory=_Lines)
    num_moves: int | None = None
    """Signs of life that it has given, as far as it has said."""
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    watchdog: str = ""
    """Newest log line in which torch's NCCL watchdog says that it aborts the process."""
    kill_at: float | None = None
    """It was told to stop; on the monotonic clock."""

    @property
    def log_tail(self) -> str:
        return "\n".join(self.tail)[-TAIL_SIZE:]

    def close(self) -> None:
        self.channel.close()
        if self.output is not None:
            os.close(self.output)
            self.output = None


class _Agent:
    def __init__(
        self, order: AgentOrder, scratch: Path, leaving: int | None, data: WorkerData | None, start_method: str
    ) -> None:
        self._order = order
        self._data = data
        self._scratch = scratch
        self._start_method = start_method
        self._modules: list[str] = []
        """What the ranks of the next attempt will need besides, if there is one: asked for in time, and once."""
        self._archive = b""
        """The sources' copies, for when the user's own files cannot be used any more."""
        self._large: SharedMemory | None = None
        """This agent's copy of the call's large arguments, for all attempts; None on the driver's machine."""
        self._large_lock = threading.Lock()
        self._used: dict[str, float] = {}
        """When checkpoints were last asked for: to note it in the files would change those that the driver has, too."""
        self._server = fork_client.connect(start_method)
        self._meeting: socket.socket | None = None
        """Where ranks knock to meet rank 0, should it be here; it opens, and who came too early waits."""
        self._leaving = leaving
        self._ranks: dict[int, _Rank] = {}
        self._num_kills_for_memory = 0
        self._open = True
        self._heartbeat_at = 0.0
        self._heartbeat_interval = HEARTBEAT_INTERVAL
        self._silent: list[_Rank] = []
        """Those that were signalled to write down their stacks."""
        self._stacks_at: float | None = None
        """When the stacks of the silent ones are read."""
        self._outcomes, self._outcome_from_thread = Pipe(duplex=False)
        self._outcome_lock = threading.Lock()
        self._lock = threading.Lock()

    def close(self) -> None:
        """Kill what is left of the ranks, of which nobody hears any more."""
        self._server.close()
        self._outcomes.close()
        self._outcome_from_thread.close()
        if self._large is not None:
            self._large.close()
        if self._meeting is not None:
            self._meeting.close()
        for rank in self._ranks.values():
            rank.close()

    def fork_ahead(self, count: int) -> None:
        """Have the first ranks forked while all agents meet; they wait for their orders."""
        self._server.ask_readiness()
        for key in range(count):
            self._fork(key)

    def serve(self, driver: Connection) -> None:
        self._driver = driver
        self._interface = interface_of(driver.own_address)
        self._meeting = _listen_at(driver.own_address)
        node, (host, port, *_) = self._describe_node(), self._meeting.getsockname()
        self._await_server()
        self._say(messages.Hello(node, (host, port)))
        self._heartbeat_at = time.monotonic() + HEARTBEAT_INTERVAL
        while self._open:
            for handle in self._due():
                handle()
            self._keep_time()

    def _await_server(self) -> None:
        """Wait until ranks can be forked: the driver refuses a worker whose agent fails before its `Hello`.

        Raises:
            ForkServerFailedError: The server has failed.
            EOFError: The driver has gone.
        """
        if self._driver.fileno() in wait([self._server.fileno(), self._driver.fileno()]):
            raise EOFError("the driver has gone")
        with contextlib.suppress(fork_client.ForkServerLostError):  # after the `Hello`, `serve` takes it as a loss
            self._server.take_readiness()

    def _describe_node(self) -> Node:
        return describe_node(self._order.worker, self._interface, self._order.num_gpus)

    def _due(self) -> list[Callable[[], None]]:
        """Wait until something is to be done, or it is time to look; what there is to do."""
        handlers: dict[int, Callable[[], None]] = {
            self._driver.fileno(): self._follow,
            self._server.fileno(): self._note_exit,
            self._outcomes.fileno(): self._pass_on_outcome,
        }
        if self._leaving is not None:
            handlers[self._leaving] = self._say_leaving
        for rank in self._ranks.values():
            if not rank.channel.closed:
                handlers[rank.channel.fileno()] = functools.partial(self._relay_reports, rank)
            if rank.output is not None:
                handlers[rank.output] = functools.partial(self._relay_output, rank)
        poll = select.poll()  # cheaper than `multiprocessing.connection.wait`, on cores that the ranks train on
        for file in handlers:
            poll.register(file, select.POLLIN)
        return [handlers[file] for file, _ in poll.poll(1000 * self._patience())]

    def _follow(self) -> None:
        message: messages.ToAgent = self._driver.recv()
        match message:
            case messages.Start():
                self._start(message)
            case messages.Stop():
                self._stop(message)
            case messages.Tell(order):
                self._tell_all(order)
                if isinstance(order, orders.Settled):
                    self._prepare_to_load()
            case messages.Dump(ranks):
                self._dump(ranks)
            case messages.Fetch(file):
                self._in_background(self._upload, file)
            case messages.Bring(chosen):
                failed = functools.partial(replace, chosen)
                self._in_background(self._bring, chosen.file, chosen, lambda reason: failed(failure=reason))
            case messages.Close():
                self._open = False
            case _:
                assert_never(message)

    def _start(self, order: messages.Start) -> None:
        self._num_kills_for_memory = num_kills_for_memory()
        self._archive = order.code.archive or self._archive
        sources = place_code(replace(order.code, archive=self._archive), self._scratch)
        if not self._ranks:
            self._change_server()
        self._heartbeat_interval = heartbeat_interval(order.places[0], order.job.pulse)
        self._heartbeat_at = min(self._heartbeat_at, time.monotonic() + self._heartbeat_interval)
        if order.job.sharding is not None and order.job.attempt == 0:
            self._modules = modules_for(order.job.sharding.base)
        for place in order.places:
            rank = self._ranks.get(place.local_rank) or self._fork(place.local_rank)
            rank.place = place
            asked = RankOrder(
                place=place,
                job=order.job,
                sources=sources,
                program=order.code.program,
                scratch=str(self._scratch),
                driver_folder=self._driver_folder(),
                directory=str(Path.cwd()),
                path=fork_server.path_here(),
                environment=orders.environment(os.environ, place, order.job, self._interface, self._scratch),
                data=self._data,
            )
            with contextlib.suppress(OSError):  # it has just ended, which is noted in its turn
                rank.channel.send(asked)
                if asked.serves_store and self._meeting is not None:
                    send_handle(rank.channel, self._meeting.fileno(), None)
        if order.job.large is not None:
            self._in_background(self._bring_large, order.job.attempt, order.job.large)
        if order.job.checkpoint is not None:
            attempt = order.job.attempt
            missing = functools.partial(orders.NotProvided, attempt)
            self._in_background(self._bring, order.job.checkpoint, orders.Provided(attempt), missing)

    def _driver_folder(self) -> str | None:
        folder = self._order.folder
        return str(folder) if folder is not None and os.access(folder, os.W_OK) else None

    def _prepare_to_load(self) -> None:
        """There are shards, which a rank takes a second less to read if it is forked with what reads them."""
        modules, self._modules = self._modules, []
        if modules:
            self._server.import_ahead(modules)

    def _change_server(self) -> None:
        """Start the next attempt from the fork server as it is now: it may have imported more than at first."""
        old, self._server = self._server, fork_client.connect(self._start_method)
        old.close()

    def _fork(self, key: int) -> _Rank:
        mine, theirs = Pipe()
        output, output_of_rank = os.pipe()
        os.set_blocking(output, False)
        rank = self._ranks[key] = _Rank(key=key, channel=mine, output=output)  # closed at last, whatever comes
        try:
            self._server.spawn(key, theirs.fileno(), output_of_rank)
        finally:
            theirs.close()
            os.close(output_of_rank)
        return rank

    def _stop(self, asked: messages.Stop) -> None:
        for rank in self._at_work():
            grace = asked.main_grace if rank.place is not None and rank.place.rank == 0 else asked.grace
            rank.kill_at = time.monotonic() + grace
            self._tell(rank, orders.Quit(asked.reason, grace))

    def _at_work(self) -> list[_Rank]:
        """Those that have had their orders; the others would take a word to them for it."""
        return [rank for rank in self._ranks.values() if rank.place is not None]

    def _say(self, message: messages.FromAgent) -> None:
        with self._lock:
            self._driver.send(message)

    def _keep_time(self) -> None:
        now = time.monotonic()
        for rank in self._ranks.values():
            if rank.kill_at is not None and now >= rank.kill_at:
                self._server.kill(rank.key, signal.SIGKILL)
        if self._stacks_at is not None and now >= self._stacks_at:
            self._stacks_at = None
            self._send_stacks()
        if now >= self._heartbeat_at:
            self._heartbeat_at = now + self._heartbeat_interval
            self._beat()
            self._show_stacks()
            self._take_requests()

    def _beat(self) -> None:
        ranks = [(rank.place, rank.num_moves) for rank in self._ranks.values()]
        told = {place.rank: count for place, count in ranks if place is not None and count is not None}
        with self._lock:
            self._driver.send_frame(heartbeat.packed(told))

    def _patience(self) -> float:
        deadlines = [rank.kill_at for rank in self._ranks.values() if rank.kill_at is not None]
        deadlines += [due for due in (self._heartbeat_at, self._stacks_at) if due is not None]
        return max(0.01, min(deadlines) - time.monotonic())

    def _say_leaving(self) -> None:
        self._leaving = None
        self._say(messages.Leaving())

    # ---- stacks

    def _dump(self, ranks: list[int]) -> None:
        """Signal ranks that hang so that they do not even listen."""
        self._silent = []
        for rank in self._ranks.values():
            if rank.place is not None and rank.place.rank in ranks:
                self._silent.append(rank)
                with contextlib.suppress(OSError):  # it may not have come so far
                    os.truncate(orders.stacks_path(self._scratch, rank.place), 0)
                self._server.signal(rank.key, orders.DUMP_SIGNAL)
        self._stacks_at = time.monotonic() + DUMP_TIME

    def _send_stacks(self) -> None:
        nothing = "(no stacks: the process does not run; is it suspended?)"
        for rank in self._silent:
            if rank.place is not None:
                text = self._stacks_of(rank.place) or nothing
                with contextlib.suppress(OSError):
                    os.truncate(orders.stacks_path(self._scratch, rank.place), 0)
                self._note_lines(rank, text.splitlines())
                self._say(messages.Stacks(rank.place.rank, text))

    def _take_requests(self) -> None:
        """Pass on what somebody here has asked of a rank; see `flame_graphs`."""
        for rank in self._at_work():
            if rank.place is not None:
                for request in self._scratch.glob(orders.flame_graph_request(rank.place.rank, "*", "*")):
                    request.unlink(missing_ok=True)
                    _, seconds, _ = request.name.rsplit("-", 2)
                    self._tell(rank, orders.DrawFlameGraph(int(seconds)))

    def _show_stacks(self) -> None:
        """Pass on what ranks have written that somebody has signalled by hand (`kill -QUIT`)."""
        if self._stacks_at is None:  # else they were signalled from here
            for rank in self._at_work():
                if rank.place is not None and (text := self._stacks_of(rank.place)):
                    os.truncate(orders.stacks_path(self._scratch, rank.place), 0)
                    self._note_lines(rank, text.splitlines())

    def _stacks_of(self, place: Place) -> str:
        try:
            return orders.stacks_path(self._scratch, place).read_text(errors="replace")[: orders.MAX_STACKS]
        except OSError:
            return ""

    # ---- what is large in the call

    def _bring_large(self, attempt: int, original: Address) -> None:
        try:
            there = orders.Large(attempt, self._find_large(original))
        except BaseException as error:  # the ranks wait for an answer
            there = orders.Large(attempt, None, f"{type(error).__name__}: {error}")
        self._note_outcome(there)

    def _find_large(self, original: Address) -> Address:
        """Return where the large arguments are in this machine's memory; fetch them once for all ranks here."""
        with self._large_lock:  # the attempt before may have asked for it, and still be waiting
            if original.is_here:
                return original
            if self._large is None:
                with contextlib.closing(self._dial_patiently()) as connection:
                    connection.send(messages.DownloadLarge())
                    self._large = SharedMemory.received(connection, original)
            return self._large.address

    # ---- checkpoints

    def _bring(self, file: CheckpointFile | None, there: orders.Order, missing: Callable[[str], orders.Order]) -> None:
        try:
            if file is not None:
                self._find(file)
        except BaseException as error:  # as above
            there = missing(f"{type(error).__name__}: {error}")
        self._note_outcome(there)

    def _note_outcome(self, there: orders.Order) -> None:
        with self._outcome_lock, contextlib.suppress(OSError):  # the gang has ended
            self._outcome_from_thread.send(there)

    def _find(self, file: CheckpointFile) -> None:
        path = self._scratch / file.name
        self._used[path.name] = time.time()  # so that it is not among the oldest, which are dropped
        if path.exists() and digest_of(path) == file.digest:
            return
        if self._order.folder is None or not link_file(self._order.folder / file.name, self._scratch):
            with contextlib.closing(dial(self._order)) as connection:
                connection.send(messages.Download(file))
                take_file(connection, file, self._scratch)

    def _pass_on_outcome(self) -> None:
        self._tell_all(self._outcomes.recv())

    def _upload(self, file: CheckpointFile) -> None:
        """Send a checkpoint, or say that it cannot be sent: the driver asks for no other until then."""
        path = self._scratch / file.name
        try:
            with contextlib.closing(self._dial_patiently()) as connection:
                is_there = self._order.folder is not None and link_file(path, self._order.folder)
                connection.send(messages.Upload(file, is_there))
                if not is_there:
                    connection.send_file(path)
        except (OSError, EOFError) as error:
            with contextlib.suppress(OSError):  # the driver has gone
                self._say(messages.NotSent(file, f"{type(error).__name__}: {error}"))
        self._drop_older_than(path)

    def _dial_patiently(self) -> Connection:
        """A driver that is out of descriptors, say, may have some again soon."""
        for wait_for in DIAL_WAITS:
            with contextlib.suppress(ConnectionError):
                return dial(self._order)
            time.sleep(wait_for)
        return dial(self._order)

    def _drop_older_than(self, newest: Path) -> None:
        """Keep a few checkpoints on this node, and those that the driver may yet ask for."""
        with contextlib.suppress(FileNotFoundError):  # one of them went to where it is loaded from
            kept = sorted(self._scratch.glob("step-*.pt"), key=self._last_used)
            for old in kept[: max(0, kept.index(newest) + 1 - NUM_FILES_KEPT)] if newest in kept else ():
                old.unlink(missing_ok=True)

    def _last_used(self, path: Path) -> float:
        return max(path.stat().st_mtime, self._used.get(path.name, 0.0))

    @staticmethod
    def _in_background(work: Callable[..., None], *args: object) -> None:
        threading.Thread(target=work, args=args, name="daskpytorch-transfer", daemon=True).start()

    # ---- the ranks' channels

    def _tell_all(self, order: orders.Order) -> None:
        for rank in self._at_work():
            self._tell(rank, order)

    @staticmethod
    def _tell(rank: _Rank, order: orders.Order) -> None:
        with contextlib.suppress(OSError):  # it is already ending
            rank.channel.send(order)

    def _relay_reports(self, rank: _Rank) -> None:
        try:
            gathered = reports.gather(rank.channel)
        except (EOFError, OSError):  # also where its exit was noted a moment ago
            rank.channel.close()
            return
        if gathered.num_moves is not None:
            rank.num_moves = gathered.num_moves
        if rank.place is not None:
            for together in gathered.messages:
                self._say(messages.Reported(rank.place.rank, together))

    def _relay_output(self, rank: _Rank) -> None:
        if rank.output is None:  # its exit was noted a moment ago
            return
        try:
            data = os.read(rank.output, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            os.close(rank.output)
            rank.output = None
        self._note_lines(rank, rank.lines.feed(data))

    def _note_lines(self, rank: _Rank, lines: list[str]) -> None:
        rank.tail.extend(line[-TAIL_SIZE:] for line in lines[-TAIL_LINES:])
        # Noted here, since stacks of all threads follow, which are longer than the tail.
        rank.watchdog = next((line[:TAIL_SIZE] for line in lines[::-1] if is_of_watchdog(line)), rank.watchdog)
        if lines and rank.place is not None:
            self._say(messages.Lines(rank.place.rank, lines))

    def _note_exit(self) -> None:
        key, exitcode = self._server.next_exit()
        with contextlib.closing(self._ranks.pop(key)) as rank:  # also where the driver has gone, and hears of nothing
            self._tell_exit(rank, exitcode)

    def _tell_exit(self, rank: _Rank, exitcode: int) -> None:
        while not rank.channel.closed and rank.channel.poll():
            self._relay_reports(rank)
        while rank.output is not None and wait([rank.output], 0):
            self._relay_output(rank)
        if rank.place is None:  # it ended before it had its orders; another is forked when they come
            return
        self._say(
            messages.Exited(
                rank=rank.place.rank,
                exitcode=exitcode,
                stopped=rank.kill_at is not None and exitcode in (orders.STOPPED, -signal.SIGKILL),
                out_of_memory=exitcode == -signal.SIGKILL and num_kills_for_memory() > self._num_kills_for_memory,
                log_tail=rank.log_tail,
                time=time.time(),
                watchdog=rank.watchdog if exitcode == -signal.SIGABRT else "",
            )
        )


def heartbeat_interval(place: Place, pulse: float | None) -> float:
    """Seconds between the heartbeats of an agent with such a rank, which says how it fares every `pulse` seconds."""
    num_agents = place.world_size // place.local_world_size
    wanted = min(HEARTBEAT_INTERVAL, pulse or HEARTBEAT_INTERVAL)
    return max(wanted, min(num_agents / MAX_HEARTBEATS, MAX_HEARTBEAT_INTERVAL))


def _listen_at(address: str) -> socket.socket:
    """A port that the system picks, for as many callers at once as it allows."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=socket.SOMAXCONN)


def dial(order: AgentOrder) -> Connection:
    """Connect to the driver; again where it hangs up, as it does on some where strangers crowd at its port.

    Raises:
        ConnectionError: It cannot be reached from here, or whoever is there is not the driver.
    """
    for wait_for in REDIAL_WAITS:
        with contextlib.suppress(ConnectionAbortedError):
            return _dial_once(order)
        time.sleep(wait_for)
    try:
        return _dial_once(order)
    except ConnectionAbortedError as error:
        raise ConnectionError(
            f"{':'.join(map(str, order.driver))}, which the worker at {order.worker} took for the driver, is not its "
            f"gang's, or is crowded by other callers ({len(REDIAL_WAITS) + 1} calls, and the last time {error}). "
            "Has the driver ended, and another process its port? The driver's log tells of callers that are not its "
            "agents crowd there."
        ) from error


def _dial_once(order: AgentOrder) -> Connection:
    host, port = order.driver
    try:
        sock = socket.create_connection((host, port), timeout=DIAL_TIMEOUT)
    except OSError as error:
        raise ConnectionError(
            f"the worker at {order.worker} cannot reach the driver at {host}:{port} ({error}). Workers must be able to "
            "open connections to the machine that runs the task: check network policies and firewalls."
        ) from error
    sock.settimeout(None)
    watch_peer(sock)
    try:
        return introduce(sock, order.token)
    except ConnectionRefusedError as error:
        raise ConnectionError(
            f"{host}:{port}, which the worker at {order.worker} took for the driver, is not its gang's ({error}). Has "
            "the driver ended, and another process its port?"
        ) from error
