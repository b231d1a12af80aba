"""The agents of one gang: who was asked, who is there, who has gone, who has come since. Runs in the driver."""

import contextlib
import functools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from flytekitplugins.daskpytorch.errors import GangError, GangStartError, WorkerLostError
from flytekitplugins.daskpytorch.protocol.code import Code
from flytekitplugins.daskpytorch.protocol.framing import Connection
from flytekitplugins.daskpytorch.protocol.messages import AgentLauncher, AgentOrder, Close, Hello, Start, ToAgent
from flytekitplugins.daskpytorch.protocol.orders import Job
from flytekitplugins.daskpytorch.protocol.placement import GpuKey, Node, Place, leave_out, worker_order

MAX_BROKEN = 2
"""How often a worker's agent may fail by itself."""
MAX_SILENCE = 15.0
"""Seconds without a word from an agent, which speaks every one to three, after which its worker counts as lost."""
SILENCE_INTERVAL = 0.5
"""Seconds between looks at who has fallen silent: at every message of a large gang that would be most of the work."""
RECRUIT_INTERVAL = 0.5
"""Seconds between looks at the workers of the cluster."""
SCHEDULER_PATIENCE = 5.0
"""Seconds for a scheduler that hung up to answer before it counts as lost; a dropped connection is back sooner."""
BUSY_SCHEDULER_PATIENCE = 30.0
"""The same for one that is still connected, which may be short of processor time; Dask's own time-out for connecting.
"""


GROWTH_SETTLE_TIME = 1.0
"""Seconds after a newcomer before a gang stops to take it in: newcomers seldom come alone."""
Call = Callable[[], object]
"""A bound call of something that notes what has happened; for the gang's thread."""


@dataclass
class Peer:
    """An agent that has said hello."""

    node: Node
    meets_at: tuple[str, int]
    """Where the ranks meet if rank 0 is there."""
    connection: Connection
    """Which knows when the agent last said anything: that is noted by the thread that hears it."""
    joined_at: float
    """By the agents' clock."""
    _has_code: bool = False

    def start(self, job: Job, code: Code, places: list[Place]) -> None:
        """Have it start ranks; the sources travel once."""
        self.send(Start(job, replace(code, archive=b"") if self._has_code else code, places))
        self._has_code = True

    def send(self, message: ToAgent) -> None:
        """Tell it something; should it be gone, that arrives as an event."""
        with contextlib.suppress(OSError):
            self.connection.send(message)


@dataclass
class Agents:
    """Keeps the list."""

    launcher: AgentLauncher
    num_ranks: int
    """Ranks per worker."""
    address: tuple[str, int]
    """Where the driver listens."""
    post: Callable[[Call], object]
    """Has the gang's thread make a call, from any other."""
    token: bytes = field(repr=False)
    """Proves to the driver who dials in."""
    num_least: int = 1
    """Workers without which the gang does not go on."""
    num_gpus: int = 0
    """GPUs that each worker's limits ask for; 0 where nobody knows."""
    folder: Path | None = None
    """The driver's, for agents that can reach it."""
    peers: dict[str, Peer] = field(default_factory=dict)
    """By worker."""
    leaving: set[str] = field(default_factory=set)
    """Workers of these that are being taken away."""
    expected: set[str] = field(default_factory=set)
    """Workers that were asked, and have not answered yet."""
    lost: dict[str, Exception] = field(default_factory=dict)
    """Workers that went, with the reason."""
    refused: dict[str, Exception] = field(default_factory=dict)
    """Workers whose agent failed, with the error: there is no use in asking them again."""
    faulty_gpus: set[GpuKey] = field(default_factory=set)
    """GPUs that have failed under a rank of this gang."""
    _by_connection: dict[Connection, Peer] = field(default_factory=dict)
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)
    _shunned: set[str] = field(default_factory=set)
    """Workers that fell silent; the scheduler may still believe in them, so nobody waits for them until they speak."""
    _launches: Counter[str] = field(default_factory=Counter)
    _num_broken: Counter[str] = field(default_factory=Counter)
    _looked_at: float = field(init=False)
    _recruit_at: float = field(init=False)
    _unanswered_since: float | None = None

    def __post_init__(self) -> None:
        self._looked_at = self.clock()
        self._recruit_at = self._looked_at + RECRUIT_INTERVAL

    def launch(self, workers: Iterable[str]) -> None:
        """Have agents started on these workers, and expect them."""
        workers = list(workers)
        self.expected |= set(workers)
        self._launch(workers)

    def _launch(self, workers: Iterable[str]) -> None:
        for number, several in self._numbered(workers).items():
            orders = [
                AgentOrder(
                    worker=worker,
                    driver=self.address,
                    num_ranks=self.num_ranks,
                    token=self.token,
                    num_gpus=self.num_gpus,
                    folder=self.folder,
                )
                for worker in several
            ]
            on_failure = functools.partial(self._post_refusal, number)
            try:
                self.launcher.launch(orders, on_failure)
            except Exception as error:  # whatever a client says without its scheduler, whose loss is noticed by itself
                for worker in several:
                    on_failure(worker, WorkerLostError(f"its agent could not be started: {error}", worker=worker))

    def _post_refusal(self, launch: int, worker: str, error: Exception) -> None:
        self.post(functools.partial(self.refuse, worker, error, launch))

    def _numbered(self, workers: Iterable[str]) -> dict[int, list[str]]:
        """The workers by how often they have been asked, this time included."""
        numbered: dict[int, list[str]] = defaultdict(list)
        for worker in workers:
            self._launches[worker] += 1
            numbered[self._launches[worker]].append(worker)
        return numbered

    def nodes(self) -> list[Node]:
        """Those that can carry ranks, in the order of their ranks."""
        fit = [peer.node for worker, peer in self.peers.items() if worker not in self.leaving]
        return sorted(fit, key=lambda node: worker_order(node.worker))

    def best_nodes(self) -> list[Node]:
        """Return the nodes that carry the next attempt, without GPUs that have failed where there are others.

        A node whose ranks would need a failed GPU carries some only where fewer than `num_least` others are there.
        """
        nodes, sound = self.nodes(), self.sound_workers()
        by_soundness = sorted(nodes, key=lambda node: node.worker not in sound)
        chosen = {node.worker for node in by_soundness[: min(self.num_wanted, max(self.num_least, len(sound)))]}
        return leave_out([node for node in nodes if node.worker in chosen], sorted(self.faulty_gpus), self.num_ranks)

    def sound_workers(self) -> set[str]:
        """Return the workers that can carry ranks and need none of the failed GPUs."""
        workers = self.peers.keys() - self.leaving
        return {worker for worker in workers if not self.faulty_gpus or self._is_sound(self.peers[worker].node)}

    def _is_sound(self, node: Node) -> bool:
        return len(node.without(self.faulty_gpus).gpus) >= min(self.num_ranks, len(node.gpus))

    @property
    def num_wanted(self) -> int:
        """How many workers the gang is to have."""
        return self.launcher.num_wanted

    @property
    def num_sound(self) -> int:
        """How many workers can carry ranks and need none of the failed GPUs."""
        return len(self.sound_workers()) if self.faulty_gpus else self.num_nodes

    @property
    def num_nodes(self) -> int:
        """How many can carry ranks."""
        return len(self.peers) - len(self.leaving)

    def find(self, connection: Connection) -> Peer | None:
        """Whose connection this is."""
        return self._by_connection.get(connection)

    def welcome(self, hello: Hello, connection: Connection) -> Peer | None:
        """An agent has come; the one of the same worker that it displaces, which is gone with all its ranks."""
        worker = hello.node.worker
        displaced = self.peers.get(worker)
        if displaced is not None:
            self.forget(displaced.connection)
            displaced.connection.hang_up()
        self.expected.discard(worker)
        self._shunned.discard(worker)
        self.lost.pop(worker, None)
        connection.heard_at = now = self.clock()
        peer = Peer(hello.node, hello.meets_at, connection, joined_at=now)
        self.peers[worker] = self._by_connection[connection] = peer
        return displaced

    def refuse(self, worker: str, error: Exception, launch: int) -> None:
        """An agent could not be started, or ended in an error before it had said hello."""
        if worker not in self.expected or launch != self._launches[worker]:
            return
        if isinstance(error, WorkerLostError):  # it may come back
            self._give_up([worker])
            return
        self.expected.discard(worker)
        self.refused[worker] = error

    def forget(self, connection: Connection) -> Peer | None:
        """An agent has gone; whose it was."""
        peer = self._by_connection.pop(connection, None)
        if peer is not None:
            del self.peers[peer.node.worker]
            self.leaving.discard(peer.node.worker)
            self.lost[peer.node.worker] = ConnectionError("the worker was lost")
        return peer

    def note_broken(self, worker: str, traceback: str) -> None:
        """An agent has failed by itself; where that happens twice the worker is not asked again."""
        self._num_broken[worker] += 1
        if self._num_broken[worker] >= MAX_BROKEN:
            last_line = traceback.rstrip().rpartition("\n")[2]
            self.refused[worker] = GangError(f"its agent failed {MAX_BROKEN} times: {last_line}", worker=worker)

    def silent(self) -> list[Peer]:
        """Agents that have not spoken for too long; looks every now and then.

        They may come to life again, and must find themselves forgotten.
        """
        now = self.clock()
        if now - self._looked_at < SILENCE_INTERVAL:
            return []
        if now - self._looked_at > MAX_SILENCE / 2:  # it is this process that was asleep
            self._unanswered_since = None
            for peer in self.peers.values():
                peer.connection.heard_at = now
        self._looked_at = now
        return [peer for peer in self.peers.values() if now - peer.connection.heard_at > MAX_SILENCE]

    def give_up_silent(self, peer: Peer) -> None:
        """Hang up on an agent that does not speak, and ask its worker again, should it come to life after all."""
        peer.connection.hang_up()
        self._shunned.add(peer.node.worker)
        self._launch([peer.node.worker])

    def note_absences(self) -> None:
        """Give up those of the expected workers that have gone before they answered; looks every now and then."""
        if self.expected and (present := self._look()) is not None:
            self._give_up(self.expected - present)

    def can_grow(self, carriers: Collection[str]) -> bool:
        """Return True if more workers can take part than these, which carry the ranks, and no other seems to follow."""
        spare = [self.peers[worker] for worker in self.sound_workers() - set(carriers)]
        if not spare or not self.leaving.isdisjoint(carriers):
            return False
        is_whole = len(carriers) + len(spare) >= self.num_wanted
        return is_whole or self.clock() >= max(peer.joined_at for peer in spare) + GROWTH_SETTLE_TIME

    def recruit(self) -> None:
        """Have agents started on workers that have come since, as long as some are missing; looks every now and then.

        Raises:
            ConnectionError: The scheduler is lost.
        """
        if (present := self._look()) is None:
            return
        self._give_up(self.expected - present)
        num_missing = self.num_wanted - self.num_sound - len(self.expected)
        newcomers = present - self.peers.keys() - self.expected - self.refused.keys() - self._shunned
        if num_missing > 0 and newcomers:
            self.launch(sorted(newcomers, key=worker_order)[:num_missing])

    def _give_up(self, workers: Iterable[str]) -> None:
        self.expected -= set(workers)
        self.lost |= {worker: ConnectionError("the worker was lost before the gang was formed") for worker in workers}

    def _look(self) -> set[str] | None:
        now = self.clock()
        if now < self._recruit_at:
            return None
        self._recruit_at = now + RECRUIT_INTERVAL
        try:
            present = set(self.launcher.present())
        except (OSError, TimeoutError) as error:
            self._unanswered_since = now if self._unanswered_since is None else self._unanswered_since
            patience = BUSY_SCHEDULER_PATIENCE if self.launcher.is_connected() else SCHEDULER_PATIENCE
            if (silence := self.clock() - self._unanswered_since) >= patience:
                raise ConnectionError(f"the Dask scheduler was lost, no answer for {silence:.0f} s: {error}") from error
            return None
        self._unanswered_since = None
        return present

    def is_hopeless(self, *, recruits: bool) -> bool:
        """Too many of the workers have said that they cannot take part, or have gone and are not replaced."""
        gone = self.refused.keys() | (set() if recruits else self.lost.keys())
        return self.num_wanted - len(gone) < self.num_least

    def too_few_came(self, name: str, timeout: float) -> GangError:
        """The error that says who did not come, and why."""
        if gone := self.refused or self.lost:
            worker, error = next(iter(gone.items()))
            # No retry will mend an image.
            kind = GangError if isinstance(error, ModuleNotFoundError) else GangStartError
            return kind(
                f"{len(gone)} of {self.num_wanted} workers could not take part in {name}; the first, {worker}: "
                f"{type(error).__name__}: {error}",
                worker=worker,
                cause=str(error),
            )
        return GangStartError(
            f"only {self.num_nodes} of {self.num_wanted} workers started their part of {name} within {timeout:g} s. "
            f"Missing: {', '.join(sorted(self.expected)) or 'those that were lost'}{self.launcher.hindrance()}. "
            "They may be busy with other tasks, or cannot reach this process; look into their logs, or raise "
            "Gang(start_timeout=...)."
        )

    def dismiss_leaving(self) -> None:
        """Let those workers go that are being taken away; they wait for their agents' end."""
        for worker in self.leaving:
            self.peers[worker].send(Close())
