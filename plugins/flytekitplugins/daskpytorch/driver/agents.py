"""The agents of one gang: launched, connected, lost and refused ones. Runs in the driver."""

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from flytekitplugins.daskpytorch.errors import GangError, GangStartError, WorkerLostError
from flytekitplugins.daskpytorch.protocol.framing import Connection
from flytekitplugins.daskpytorch.protocol.host import AgentLauncher, AgentOrder
from flytekitplugins.daskpytorch.protocol.messages import Hello, ToAgent
from flytekitplugins.daskpytorch.protocol.placement import Node, worker_order

MAX_SILENCE = 15.0
"""Seconds without a message after which an agent counts as lost. Agents send messages every 1 to 5 s."""
SILENCE_INTERVAL = 0.5
"""Seconds between two checks for silent agents: checks at every message would take most of a large gang's time."""
RECRUIT_INTERVAL = 0.2
SCHEDULER_TIMEOUT = 5.0
"""Seconds without an answer after which a disconnected Dask scheduler counts as lost: a client reconnects sooner."""
BUSY_SCHEDULER_TIMEOUT = 30.0
"""As `SCHEDULER_TIMEOUT`, for a connected scheduler, which may be busy. Dask's own timeout."""
Action = Callable[[], object]


@dataclass
class Peer:
    node: Node
    meets_at: tuple[str, int]
    connection: Connection
    """The receiving thread sets its `heard_at`, the time of the agent's last message."""
    traceback: str | None = None
    """Traceback of the agent's own error, after which its connection ends."""

    def send(self, message: ToAgent) -> None:
        """Loss of the connection raises no error here, but arrives as an event."""
        with contextlib.suppress(OSError):
            self.connection.send(message)


@dataclass
class Agents:
    launcher: AgentLauncher
    order: AgentOrder
    post: Callable[[Action], object]
    num_least: int = 1
    peers: dict[str, Peer] = field(default_factory=dict)
    leaving: set[str] = field(default_factory=set)
    expected: dict[str, int] = field(default_factory=dict)
    """Workers whose agent has yet to come, with the number of the launch."""
    lost: dict[str, Exception] = field(default_factory=dict)
    refused: dict[str, Exception] = field(default_factory=dict)
    """Workers whose agent failed, and that get no more agents."""
    faulty: set[str] = field(default_factory=set)
    """Workers on which a GPU has failed. They count as lost."""
    _by_connection: dict[Connection, Peer] = field(default_factory=dict)
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)
    _silent_workers: set[str] = field(default_factory=set)
    """`recruit` skips these workers, although the scheduler may list them, until their agent reconnects."""
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _looked_at: float = field(init=False)
    _recruit_at: float = field(init=False)
    _unanswered_since: float | None = None

    def __post_init__(self) -> None:
        self._looked_at = self.clock()
        self._recruit_at = self._looked_at + RECRUIT_INTERVAL

    def launch(self, workers: Iterable[str]) -> None:
        workers, launch = list(workers), next(self._numbers)
        self.expected |= dict.fromkeys(workers, launch)
        self._launch(workers, launch)

    def _launch(self, workers: Sequence[str], launch: int) -> None:
        on_failure = functools.partial(self._post_refusal, launch)
        try:
            self.launcher.launch([replace(self.order, worker=worker) for worker in workers], on_failure)
        except Exception as error:  # any error of a client without its scheduler, whose loss `_look` finds
            for worker in workers:
                on_failure(worker, WorkerLostError(f"its agent could not be started: {error}", worker=worker))

    def _post_refusal(self, launch: int, worker: str, error: Exception) -> None:
        self.post(functools.partial(self.refuse, worker, error, launch))

    def best_nodes(self) -> list[Node]:
        """Return the next attempt's nodes."""
        chosen = sorted(self.sound_workers(), key=worker_order)[: self.num_wanted]
        return [self.peers[worker].node for worker in chosen]

    def sound_workers(self) -> set[str]:
        return self.peers.keys() - self.leaving - self.faulty

    @property
    def num_wanted(self) -> int:
        return self.launcher.num_wanted

    @property
    def num_nodes(self) -> int:
        return len(self.sound_workers())

    def find(self, connection: Connection) -> Peer | None:
        return self._by_connection.get(connection)

    def welcome(self, hello: Hello, connection: Connection) -> Peer | None:
        worker = hello.node.worker
        displaced = self.peers.get(worker)
        if displaced is not None:
            self.forget(displaced.connection)
            displaced.connection.hang_up()
        self.expected.pop(worker, None)
        self._silent_workers.discard(worker)
        self.lost.pop(worker, None)
        connection.heard_at = self.clock()
        peer = Peer(hello.node, hello.meets_at, connection)
        self.peers[worker] = self._by_connection[connection] = peer
        return displaced

    def refuse(self, worker: str, error: Exception, launch: int) -> None:
        """Record an agent that failed before its `Hello`, unless the launch is outdated.

        Only a `WorkerLostError` permits another.
        """
        if self.expected.get(worker) != launch:
            return
        reasons = self.lost if isinstance(error, WorkerLostError) else self.refused  # a lost worker may come back
        reasons[worker] = error
        del self.expected[worker]

    def forget(self, connection: Connection) -> Peer | None:
        peer = self._by_connection.pop(connection, None)
        if peer is not None:
            del self.peers[peer.node.worker]
            self.leaving.discard(peer.node.worker)
            self.lost[peer.node.worker] = ConnectionError("the worker was lost")
        return peer

    def silent(self) -> list[Peer]:
        """Return the agents without a message for `MAX_SILENCE`. The caller must forget them, as they may resume."""
        now = self.clock()
        if now - self._looked_at < SILENCE_INTERVAL:
            return []
        if now - self._looked_at > MAX_SILENCE / 2:  # the driver itself was suspended
            self._unanswered_since = None
            for peer in self.peers.values():
                peer.connection.heard_at = now
        self._looked_at = now
        return [peer for peer in self.peers.values() if now - peer.connection.heard_at > MAX_SILENCE]

    def give_up_silent(self, peer: Peer) -> None:
        """Hang up, and launch another agent on the worker, in case it resumes."""
        peer.connection.hang_up()
        self._silent_workers.add(peer.node.worker)
        self._launch([peer.node.worker], next(self._numbers))

    def can_grow(self, carriers: Collection[str]) -> bool:
        """Return True if a restart would add workers to these `carriers`."""
        return bool(self.sound_workers() - set(carriers)) and self.leaving.isdisjoint(carriers)

    def recruit(self) -> None:
        """Launch agents on new workers while the gang lacks some. Raises `WorkerLostError` if the scheduler is lost."""
        if (present := self._look()) is None:
            return
        for worker in self.expected.keys() - present:
            del self.expected[worker]
            self.lost[worker] = ConnectionError("the worker was lost before the gang was formed")
        num_missing = self.num_wanted - self.num_nodes - len(self.expected)
        newcomers = present - self.peers.keys() - self.expected.keys() - self.refused.keys() - self._silent_workers
        if num_missing > 0 and newcomers:
            self.launch(sorted(newcomers, key=worker_order)[:num_missing])

    def _look(self) -> set[str] | None:
        now = self.clock()
        if now < self._recruit_at:
            return None
        self._recruit_at = now + RECRUIT_INTERVAL
        try:
            present = set(self.launcher.present())
        except (OSError, TimeoutError) as error:
            self._unanswered_since = now if self._unanswered_since is None else self._unanswered_since
            timeout = BUSY_SCHEDULER_TIMEOUT if self.launcher.is_connected() else SCHEDULER_TIMEOUT
            if (silence := self.clock() - self._unanswered_since) >= timeout:
                cause = f"the Dask scheduler was lost, no answer for {silence:.0f} s: {error}"
                raise WorkerLostError(f"{cause}. See the scheduler's log", cause=cause) from error
            return None
        self._unanswered_since = None
        return present

    def verdict(self, *, is_first: bool, is_settled: bool, is_late: bool) -> Literal["start", "wait", "refuse"]:
        """`is_settled`: the pause after the last loss is over. `is_late`: the time for the start is over."""
        if self.num_nodes == self.num_wanted:
            return "start"
        is_calm = is_settled and not (is_first and self.expected)
        if self.num_nodes >= self.num_least and (is_calm or is_late):
            return "start"
        is_hopeless = is_first and self.num_wanted - len(self.refused) < self.num_least
        return "refuse" if is_late or is_hopeless else "wait"

    def awaited(self) -> str:
        if self.launcher.scheduler is None and self.num_wanted == 1:
            return "waiting until this node can start the ranks"
        return f"{self.num_nodes} of {self.num_wanted} workers are here, waiting for the others"

    def too_few_came(self, name: str, timeout: float) -> GangError:
        if gone := self.refused or self.lost:
            worker, error = next(iter(gone.items()))
            # A retry does not add a missing module to the worker's image.
            type_ = GangError if isinstance(error, ModuleNotFoundError) else GangStartError
            title = self.launcher.title(worker)
            return type_(
                f"{len(gone)} of {self.num_wanted} workers could not take part in {name}; the first, {title}: "
                f"{type(error).__name__}: {str(error).rstrip('.')}. That worker's log may say more.",
                worker=worker,
                cause=str(error),
                kind="start",
            )
        missing = ", ".join(map(self.launcher.title, sorted(self.expected)))
        return GangStartError(
            f"only {self.num_nodes} of {self.num_wanted} workers started their part of {name} within {timeout:g} s. "
            f"Missing: {missing or 'those that were lost'}. "
            "They may be busy with other tasks, paused by Dask for their memory, or cannot reach this process; look "
            "into their logs, or raise Gang(start_timeout=...)."
        )

    def too_few_left(self, name: str, timeout: float, failures: Iterable[str]) -> WorkerLostError:
        told = "\n".join(failures)
        return WorkerLostError(
            f"{self.num_nodes} of {self.num_wanted} workers are left of {name}, {self.num_least} are needed, "
            f"and no others came within {timeout:g} s. Lower "
            f"Gang(min_workers=...) to go on with fewer, or raise start_timeout. Failures so far:\n{told}"
        )
