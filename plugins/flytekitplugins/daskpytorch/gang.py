"""The driver's brain: takes the workers, places the ranks, hears of everything, ends it all at the first failure.

One `Supervisor` per gang. Agents dial in and live as long as the gang; what they do is said in messages. A restart
will be a new generation: the same agents, another `Start` with a fresh rendezvous prefix (see `Job.generation`).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Protocol

from flytekitplugins.daskpytorch import messages, placement, ship
from flytekitplugins.daskpytorch.blame import Failure, GangStartError, RankExit, verdict
from flytekitplugins.daskpytorch.config import Gang
from flytekitplugins.daskpytorch.flyte import FlyteSettings
from flytekitplugins.daskpytorch.listener import Event, Listener
from flytekitplugins.daskpytorch.messages import AgentOrder
from flytekitplugins.daskpytorch.node import local_versions
from flytekitplugins.daskpytorch.observer import Observer, Shape
from flytekitplugins.daskpytorch.placement import Node, Place
from flytekitplugins.daskpytorch.rank import Job
from flytekitplugins.daskpytorch.ship import Code
from flytekitplugins.daskpytorch.tracking import RunSettings

__all__ = ["AgentLauncher", "GangCancelledError", "Request", "Supervisor"]

BLAME_WINDOW = 0.7
"""Seconds to wait for a better culprit while every failure so far reads like the loss of a peer."""
MAX_LEAVE_WAIT = 75.0
"""Seconds for the ranks to leave once all have delivered; more than Weights & Biases may take to close its run."""
MAX_STOP_WAIT = 15.0
"""Seconds for the ranks to end once they are told to stop; more than an agent waits before it kills."""


MUSTER_INTERVAL = 1.0
"""Seconds between looks at which workers have gone, while some are still to say hello."""
DISMISS_TIMEOUT = 5.0
"""Seconds for the agents to clean up after the last rank has left."""


class GangCancelledError(Exception):
    """The gang was cancelled."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One training run, ready to go."""

    name: str
    call: bytes
    ranks_per_worker: int
    settings: Gang
    pass_local_rank: bool = False
    flyte: FlyteSettings | None = None
    tracking: Callable[[Shape], RunSettings] | None = None


class AgentLauncher(Protocol):
    """Starts agents, one per worker, wherever those are."""

    workers: Sequence[str]
    """The workers' addresses, in the order of their ranks."""
    host: str
    """The address at which the workers can reach this process."""

    def launch(self, orders: Sequence[AgentOrder], on_failure: Callable[[str, Exception], None]) -> None:
        """Start the agents; `on_failure(worker, error)` is called for one that ended in an error."""

    def lost_workers(self) -> Sequence[str]:
        """Those of the workers that have gone since."""

    def close(self) -> None:
        """Forget the agents; they end with their connections."""


@dataclass
class _Peer:
    """An agent that has said hello."""

    node: Node
    connection: Connection


@dataclass
class _Generation:
    """What has happened to the ranks of one generation."""

    places: dict[int, tuple[Place, _Peer]]
    ready: set[int] = field(default_factory=set)
    results: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    exits: dict[int, RankExit] = field(default_factory=dict)
    stop_at: float | None = None
    """When to end it: a better culprit may be found before, or the last rank may leave; on the monotonic clock."""

    @property
    def is_over(self) -> bool:
        return len(self.exits) == len(self.places)

    @property
    def bad_exits(self) -> list[RankExit]:
        """Exits without a result. A rank that has delivered is out of danger, whatever happens to it then."""
        return [exit_ for rank, exit_ in self.exits.items() if rank not in self.results]

    @property
    def unclean_exits(self) -> list[RankExit]:
        """All but the exits of ranks that delivered and left in good order: what the blame is found among."""
        return [exit_ for rank, exit_ in self.exits.items() if rank not in self.results or exit_.exitcode != 0]

    @property
    def is_failing(self) -> bool:
        return bool(self.failures or self.bad_exits)

    @property
    def has_earnest_failure(self) -> bool:
        """Some rank failed, and not because it lost a peer."""
        return any(not failure.is_consequence for failure in self.failures.values()) or any(
            not exit_.is_consequence for exit_ in self.bad_exits
        )


class Supervisor:
    """Runs one gang from its first worker to its last exit."""

    def __init__(self, request: Request, launcher: AgentLauncher, observers: Sequence[Observer] = ()) -> None:
        self._request = request
        self._launcher = launcher
        self._observers = observers
        self._events: queue.Queue[Event] = queue.Queue()
        self._token = secrets.token_bytes(32)
        self._peers: dict[str, _Peer] = {}
        self._broken: dict[Connection, Failure] = {}
        self._asked_at = time.monotonic()

    def cancel(self) -> None:
        """End the gang from any thread; `run` raises `GangCancelledError`."""
        self._events.put(("cancel", None, None))

    def run(self) -> list[Any]:
        """Form the gang and see it through; the ranks' reported results, in rank order.

        Raises:
            GangStartError: Workers or ranks did not come within `start_timeout`.
            ValueError: The workers do not suit what was asked for.
            GangError: A rank failed; or the rank's own exception, from such an error.
            WorkerLostError: A worker or a rank's process was taken away.
            GangCancelledError: `cancel` was called.
        """
        error: Exception | None = None
        try:
            with contextlib.closing(Listener(self._launcher.host, self._token, self._events)) as listener:
                return self._run(listener)
        except Exception as caught:
            error = caught
            raise
        finally:
            self._dismiss()
            self._launcher.close()
            self._observe("ended", error)

    def _run(self, listener: Listener) -> list[Any]:
        self._launcher.launch(
            [self._agent_order(worker, listener.address) for worker in self._launcher.workers],
            lambda worker, error: self._events.put(("not launched", worker, error)),
        )
        code = ship.pack_code()  # while the agents are on their way
        nodes = self._muster()
        _check_versions(nodes)
        shape = self._place(nodes)
        with _rendezvous_store(self._launcher.host) as store:
            generation = self._start(shape, code, store)
            self._watch(generation)
            if generation.bad_exits:
                raise verdict(generation.unclean_exits, shape.world_size)
            return [generation.results[rank] for rank in range(shape.world_size)]

    # ---- forming the gang

    def _agent_order(self, worker: str, address: tuple[str, int]) -> AgentOrder:
        return AgentOrder(worker=worker, driver=address, num_ranks=self._request.ranks_per_worker, token=self._token)

    def _muster(self) -> list[Node]:
        """Wait until every agent has said hello; the nodes in the order of their ranks."""
        deadline = self._asked_at + self._request.settings.start_timeout
        lost: dict[str, Exception] = {}
        workers = self._launcher.workers
        least = self._request.settings.min_workers or len(workers)
        while len(self._peers) + len(lost) < len(workers):
            kind, source, value = self._next_event(min(MUSTER_INTERVAL, deadline - time.monotonic()))
            if kind == "message" and isinstance(value, messages.Hello):
                self._peers[value.node.worker] = _Peer(value.node, source)
            elif kind == "not launched" and source not in self._peers:
                lost[source] = value
            elif kind == "gone":
                self._forget(source, lost)
            elif kind == "cancel":
                raise GangCancelledError(f"{self._request.name} was cancelled")
            elif kind == "timeout":
                gone = [worker for worker in self._launcher.lost_workers() if worker not in self._peers]
                lost |= {worker: ConnectionError("the worker was lost before the gang was formed") for worker in gone}
            if len(workers) - len(lost) < least or time.monotonic() >= deadline:
                break
        if len(self._peers) < least:
            raise self._too_few(lost)
        return [self._peers[worker].node for worker in workers if worker in self._peers]

    def _forget(self, connection: Connection, lost: dict[str, Exception]) -> None:
        for worker, peer in list(self._peers.items()):
            if peer.connection is connection:
                del self._peers[worker]
                lost[worker] = ConnectionError("the worker was lost before the gang was formed")

    def _too_few(self, lost: dict[str, Exception]) -> Exception:
        workers = self._launcher.workers
        if lost:
            worker, error = next(iter(lost.items()))
            return GangStartError(
                f"{len(lost)} of {len(workers)} workers could not take part in {self._request.name}; the first, "
                f"{worker}: {type(error).__name__}: {error}",
                worker=worker,
                cause=str(error),
            )
        missing = [worker for worker in workers if worker not in self._peers]
        return GangStartError(
            f"only {len(self._peers)} of {len(workers)} workers started their part of {self._request.name} within "
            f"{self._request.settings.start_timeout:g} s. Missing: {', '.join(missing)}. They may be busy with other "
            "tasks, or cannot reach this process; look into their logs, or raise Gang(start_timeout=...).",
        )

    def _place(self, nodes: list[Node]) -> Shape:
        places = placement.place_ranks(nodes, self._request.ranks_per_worker)
        backend = placement.choose_backend(self._request.settings.backend, nodes, places)
        shape = Shape(name=self._request.name, backend=backend, nodes=nodes, places=places)
        self._observe("placed", shape)
        return shape

    def _start(self, shape: Shape, code: Code, store: tuple[str, int], number: int = 0) -> _Generation:
        job = Job(
            gang=self._token[:8].hex(),
            generation=number,
            call=self._request.call,
            pass_local_rank=self._request.pass_local_rank,
            backend=shape.backend,
            store=store,
            timeout=self._request.settings.start_timeout,
            flyte=self._request.flyte,
            tracking=self._request.tracking(shape) if self._request.tracking else None,
        )
        generation = _Generation(places={})
        for node, places in zip(shape.nodes, shape.places, strict=True):
            peer = self._peers[node.worker]
            generation.places |= {place.rank: (place, peer) for place in places}
            _send(peer, messages.Start(job, code, places))
        return generation

    # ---- seeing it through

    def _watch(self, generation: _Generation) -> None:
        """Until every rank has left: all with results, or all because one failed."""
        deadline = self._asked_at + self._request.settings.start_timeout
        while not generation.is_over:
            kind, source, value = self._next_event(self._patience(generation, deadline))
            if kind == "message":
                self._take(generation, source, value)
            elif kind == "gone":
                self._lose(generation, source)
            elif kind == "cancel":
                self._stop(generation)
                raise GangCancelledError(f"{self._request.name} was cancelled")
            self._decide(generation, deadline)

    def _patience(self, generation: _Generation, deadline: float) -> float | None:
        if generation.stop_at is not None:
            return generation.stop_at - time.monotonic()
        if len(generation.ready) < len(generation.places):
            return deadline - time.monotonic()
        return None

    def _take(self, generation: _Generation, source: Connection, message: object) -> None:
        match message:
            case messages.Broken(text):
                last_line = text.rstrip().rpartition("\n")[2]
                self._broken[source] = Failure(
                    type_name="GangError",
                    message=f"the agent that watches its ranks failed: {last_line}",
                    traceback=text,
                    pickled=None,
                    time=time.time(),
                    is_consequence=False,
                )
            case messages.Lines(rank, lines):
                self._observe("wrote", rank, lines)
            case messages.Reported(rank, report):
                self._take_report(generation, rank, *pickle.loads(report))
            case messages.Exited():
                self._note_exit(generation, message)

    def _take_report(self, generation: _Generation, rank: int, kind: str, value: Any) -> None:
        if kind == "log":
            self._observe("logged", value)
        elif kind == "failure":
            generation.failures[rank] = value
        elif kind == "ready":
            generation.ready.add(rank)
            if len(generation.ready) == len(generation.places):
                self._observe("formed", time.monotonic() - self._asked_at)
        elif kind == "result":
            generation.results[rank] = value
            if len(generation.results) == len(generation.places):
                self._broadcast(messages.End())
                generation.stop_at = time.monotonic() + MAX_LEAVE_WAIT

    def _note_exit(self, generation: _Generation, exited: messages.Exited) -> None:
        place, peer = generation.places[exited.rank]
        generation.exits[place.rank] = RankExit(
            rank=place.rank,
            worker=peer.node.worker,
            host=peer.node.host,
            exitcode=exited.exitcode,
            failure=generation.failures.get(place.rank),
            log_tail=exited.log_tail,
            time=exited.time,
            out_of_memory=exited.out_of_memory,
            stopped=exited.stopped,
        )

    def _lose(self, generation: _Generation, connection: Connection) -> None:
        """A worker has gone, and its ranks with it."""
        for worker, peer in list(self._peers.items()):
            if peer.connection is connection:
                del self._peers[worker]
        for rank, (_, peer) in generation.places.items():
            if peer.connection is connection and rank not in generation.exits:
                generation.exits[rank] = RankExit(
                    rank=rank,
                    worker=peer.node.worker,
                    host=peer.node.host,
                    exitcode=None,
                    failure=generation.failures.get(rank) or self._broken.get(connection),
                    log_tail="",
                    time=time.time(),
                )

    def _decide(self, generation: _Generation, deadline: float) -> None:
        """End the generation at its first failure in earnest, or soon after one that reads like a consequence."""
        now = time.monotonic()
        if generation.stop_at is not None and now >= generation.stop_at:
            self._stop(generation)
        elif not generation.is_failing:
            if len(generation.ready) < len(generation.places) and now >= deadline:
                self._stop(generation)
                raise self._not_formed(generation)
        elif generation.has_earnest_failure:
            self._stop(generation)
        elif generation.stop_at is None:
            generation.stop_at = now + BLAME_WINDOW

    def _stop(self, generation: _Generation) -> None:
        """End every rank, and wait until all are gone; late failures still count for the blame."""
        self._broadcast(messages.Stop())
        deadline = time.monotonic() + MAX_STOP_WAIT
        while not generation.is_over and time.monotonic() < deadline:
            kind, source, value = self._next_event(deadline - time.monotonic())
            if kind == "message":
                self._take(generation, source, value)
            elif kind == "gone":
                self._lose(generation, source)
        for rank, (_, peer) in generation.places.items():
            if rank not in generation.exits:  # its worker does not even answer (it may be suspended)
                self._lose(generation, peer.connection)
                _hang_up(peer.connection)

    def _not_formed(self, generation: _Generation) -> Exception:
        missing = sorted(set(generation.places) - generation.ready)
        tails = [f"rank {rank}: {generation.exits[rank].log_tail or '(no output)'}" for rank in missing[:4]]
        return GangStartError(
            f"{len(generation.ready)} of {len(generation.places)} ranks met within "
            f"{self._request.settings.start_timeout:g} s; missing: {', '.join(map(str, missing))}. They may not "
            "reach each other, or importing the function's module takes too long.\n" + "\n".join(tails),
            rank=missing[0],
        )

    # ---- talking

    def _dismiss(self) -> None:
        """Let the agents go, and wait until they have cleaned up."""
        self._broadcast(messages.Close())
        staying = {peer.connection for peer in self._peers.values()}
        deadline = time.monotonic() + DISMISS_TIMEOUT
        while staying and time.monotonic() < deadline:
            kind, source, _ = self._next_event(deadline - time.monotonic())
            if kind == "gone":
                staying.discard(source)
        for connection in staying:
            _hang_up(connection)

    def _broadcast(self, message: object) -> None:
        for peer in self._peers.values():
            _send(peer, message)

    def _next_event(self, timeout: float | None) -> Event:
        try:
            return self._events.get(timeout=None if timeout is None else max(0.0, timeout))
        except queue.Empty:
            return ("timeout", None, None)

    def _observe(self, method: str, *args: object) -> None:
        for observer in self._observers:
            getattr(observer, method)(*args)


@contextlib.contextmanager
def _rendezvous_store(host: str) -> Any:
    """A store on a port that the system picks, in this process, which outlives every rank."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    yield host, store.port
    del store


def _check_versions(nodes: Sequence[Node]) -> None:
    mine = local_versions()
    differing = [
        f"{node.worker} has {name} {theirs}, this process {mine.get(name)}"
        for node in nodes
        for name, theirs in node.versions.items()
        if theirs != mine.get(name)
    ]
    if differing:
        raise ValueError(
            f"driver and workers differ: {'; '.join(differing)}. Use one image for the task and its Dask cluster."
        )


def _hang_up(connection: Connection) -> None:
    """End a connection for both sides; a thread that reads from it wakes up, which it would not if it were closed."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as sock:
        sock.shutdown(socket.SHUT_RDWR)


def _send(peer: _Peer, message: object) -> None:
    with contextlib.suppress(OSError):  # its loss arrives as an event
        peer.connection.send(message)
