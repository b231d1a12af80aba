"""State of one attempt of a gang: its ranks, their results, failures and exits. Runs in the driver.

The driver's thread records events in an `Attempt`, and `Brain` reads their meaning from its properties.
`Attempt.tell` sends messages to the agents of all ranks.
"""

import functools
import math
import pickle
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flytekitplugins.daskpytorch.driver.agents import Peer
from flytekitplugins.daskpytorch.driver.blame import find_root_failure
from flytekitplugins.daskpytorch.driver.collectives import left_waiting
from flytekitplugins.daskpytorch.driver.hang_detector import Stillness, explain_failure
from flytekitplugins.daskpytorch.errors import GangStartError
from flytekitplugins.daskpytorch.protocol.failure import Failure, RankExit, Recalled
from flytekitplugins.daskpytorch.protocol.messages import Exited, Tell, ToAgent
from flytekitplugins.daskpytorch.protocol.orders import Arrived, Locate
from flytekitplugins.daskpytorch.protocol.placement import GpuKey, Node, Place
from flytekitplugins.daskpytorch.protocol.reports import Located, Remembered, ShardsNotWritten, Wanted
from flytekitplugins.daskpytorch.protocol.sharded import WrittenShards
from flytekitplugins.daskpytorch.records import Goodput

NONE = pickle.dumps(None)
"""Return value of a program's rank that has reported none."""
KEPT_FOR = 1.0
"""Seconds that a rank whose debugger steps keeps the terminal. A step over a collective may need another rank."""


@dataclass
class Prompts:
    """Gives the terminal to one rank's debugger at a time."""

    clock: Callable[[], float]
    shown: int | None = None
    """The rank whose debugger's prompt the terminal shows. None: no rank has the terminal."""
    tell: Callable[[int | None], object] = lambda _: None
    """Called with the rank that gets the terminal, and with None when a rank leaves the terminal or ends."""
    debugged: set[int] = field(default_factory=set)
    """Ranks in a debugger, or in the queue for the terminal. While there are any, no rank counts as hung."""
    _waiting: list[int] = field(default_factory=list)
    _kept_for: int | None = None
    _kept_until: float = 0.0

    def ask(self, rank: int) -> None:
        """Queue a rank that wants the terminal."""
        self.debugged.add(rank)
        self._waiting.append(rank)

    def leave(self, rank: int, *, steps: bool) -> None:
        """Record that a rank's debugger has left its prompt, so that the rank's function goes on.

        Args:
            rank: The rank.
            steps: True if the debugger will soon ask for the terminal again, for example after `next`.
        """
        if not steps:
            self.debugged.discard(rank)
        if rank == self.shown:  # else the rank has an attached terminal
            self.shown = None
            self.tell(None)
            if steps:
                self._kept_for, self._kept_until = rank, self.clock() + KEPT_FOR

    def forget(self, rank: int) -> None:
        """Record that a rank has ended or failed."""
        self._waiting = [other for other in self._waiting if other != rank]
        self.leave(rank, steps=False)

    @property
    def due(self) -> float | None:
        """Time (driver's clock, seconds) at which the next rank may get the terminal. None: no rank."""
        return self._kept_until if self._waiting and self.shown is None else None

    def turn(self) -> int | None:
        """Give the free terminal to the next rank and return the rank, which keeps it until `leave`.

        Returns:
            The rank. None: the terminal is taken, or kept for a rank whose debugger steps, or no rank waits.
        """
        if self.shown is not None or not self._waiting:
            return None
        is_kept = self._kept_for in self.debugged and self.clock() < self._kept_until
        if is_kept and self._kept_for not in self._waiting:
            return None
        self.shown = self._kept_for if is_kept and self._kept_for is not None else self._waiting[0]
        self._waiting.remove(self.shown)
        self.tell(self.shown)
        return self.shown


@dataclass
class Attempt:
    """Records the events of one attempt's ranks. Times are seconds on the driver's clock, unless stated otherwise."""

    number: int
    places: dict[int, tuple[Place, Node]]
    """Place and worker's node of each rank."""
    carriers: Sequence[Peer] = ()
    """Agents that carry the attempt's ranks, lost agents included."""
    has_observers: bool = False
    """True if rank 0 has observers, which need time to close at its end."""
    is_program: bool = False
    """True if the ranks run a script or module, so that the exit code of a rank's process is its result."""
    ready: set[int] = field(default_factory=set)
    """Ranks that have joined the process group."""
    results: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    exits: dict[int, RankExit] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    hang: tuple[int, str] | None = None
    """The rank that holds up the gang, and the report. None: no hang was found."""
    difference: str | None = None
    """The mismatch between the ranks' collectives that explains a failure. None: not found."""
    held: dict[int, int] = field(default_factory=dict)
    """Number of each rank's calls of `should_stop`, which the rank reports after a `Hold` order."""
    wanted: list[tuple[Peer, int, Wanted]] = field(default_factory=list)
    """Unanswered checkpoint requests: the rank's agent, the rank and the request."""
    delivered_at: float | None = None
    """Time at which the functions of all ranks had returned. None before."""
    chosen: dict[int, Arrived] = field(default_factory=dict)
    """Checkpoint that rank 0 got to load, by the number of its request. Other ranks receive the same checkpoint."""
    accounts: dict[int, Goodput] = field(default_factory=dict)
    """Goodput that the driver has sent to ranks, by the number of the ranks' request. All ranks receive the same."""
    accounts_wanted: list[tuple[Peer, int]] = field(default_factory=list)
    """Goodput requests of ranks other than 0: agent and request number. The driver answers after rank 0's next report
    about its time."""
    has_saved: bool = False
    """True after a checkpoint of this attempt has reached the driver or was committed in storage."""
    shards: dict[int, dict[int, WrittenShards | ShardsNotWritten]] = field(default_factory=dict)
    """Ranks' reports about unfinished sharded checkpoints, by save number and rank."""
    has_stopped_early: bool = False
    """True if a rank has returned after its `should_stop` had returned True."""
    look: int = 0
    """Number of the newest `Locate` order. Answers to earlier orders do not count."""
    located: dict[int, Located] = field(default_factory=dict)
    """Stacks and progress of each rank, in answer to the newest `Locate` order."""
    stacks: dict[int, str] = field(default_factory=dict)
    """Stacks of ranks that did not answer a `Locate` order and got a signal instead."""
    remembered: dict[int, Recalled | None] = field(default_factory=dict)
    """Newest collectives of each rank that failed, aborts or answered a `Locate` order. None: no flight record."""
    final: dict[int, Recalled | None] = field(default_factory=dict)
    """The part of `remembered` that ranks reported with their failure, before an abort or as they left their peers."""
    at_rest: set[int] = field(default_factory=set)
    """Ranks of a staying gang that wait for the next call."""
    call_failures: dict[int, Failure] = field(default_factory=dict)
    """Exceptions of the present call of a staying gang that leave the gang alive, unless other ranks wait for ever."""
    ask_at: float = math.inf
    """Time to ask all ranks for their stacks, after a failure that a collective may have caused. Infinite: not set."""
    stillness: Stillness | None = None
    """Time of each rank's last progress. None until the process group is formed."""
    hangs_at: float = 0.0
    """Earliest time at which the attempt may be declared hung. Progress of the running ranks only makes it later."""
    stop_at: float | None = None
    """Time to stop all ranks, at the end of the search for a failure's cause or of the wait for exits. None: not
    set."""
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)
    began_at: float = field(init=False)
    """Start of the attempt, from which `start_timeout` counts. Moves to the end of a debugger's prompt or a
    checkpoint's commit that delayed ranks."""
    prompts: Prompts = field(init=False)
    _bad_exits: dict[int, RankExit] = field(default_factory=dict)
    """Exits without a result. After a function's result, its rank's exit counts as good."""
    _has_independent_failure: bool = False

    def __post_init__(self) -> None:
        self.began_at = self.clock()
        self.prompts = Prompts(self.clock)

    @functools.cached_property
    def ranks_of(self) -> Mapping[str, list[int]]:
        """Ranks of each worker that carries the attempt."""
        ranks = defaultdict(list)
        for rank, (_, node) in self.places.items():
            ranks[node.worker].append(rank)
        return ranks

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.places)

    @property
    def is_formed(self) -> bool:
        """True if all ranks have joined the process group."""
        return len(self.ready) == len(self.places)

    @property
    def has_delivered(self) -> bool:
        """True if every rank's function has returned."""
        return len(self.results) == len(self.places)

    @property
    def is_over(self) -> bool:
        """True if every rank has ended."""
        return len(self.exits) == len(self.places)

    @property
    def running(self) -> list[int]:
        """Ranks whose function, or whose present call, has neither returned nor failed."""
        ended = self.results.keys() | self.exits.keys() | self.failures.keys() | self.at_rest
        return [rank for rank in self.places if rank not in ended]

    @property
    def is_failing(self) -> bool:
        """True if a rank has failed, hung or ended without a result."""
        return bool(self.failures or self._bad_exits or self.hang)

    @property
    def has_independent_failure(self) -> bool:
        """True if a rank hung or failed, except by the loss of a peer."""
        return self.hang is not None or self._has_independent_failure

    @property
    def has_own_failure(self) -> bool:
        """True if the root failure is neither a lost peer nor lost infrastructure."""
        return self.has_independent_failure and not self.root_failure().is_infrastructure

    @property
    def faulty_gpus(self) -> set[GpuKey]:
        """GPUs whose fault ended their rank."""
        placed = [self.places[exit_.rank] for exit_ in self._bad_exits.values() if exit_.gpu_fault]
        return {node.key_of(place.gpu) for place, node in placed if place.gpu is not None}

    def tell(self, message: ToAgent) -> None:
        """Send a message to the agents of the attempt's ranks. New workers' agents do not get the message."""
        for peer in self.carriers:
            peer.send(message)

    def locate(self) -> None:
        """Request all ranks' stacks, progress and newest collectives."""
        self.look += 1
        self.located.clear()
        self.remembered = dict(self.final)
        self.tell(Tell(Locate(self.look)))

    def note_located(self, rank: int, located: Located) -> None:
        """Record a rank's stacks and progress. The rank's newest collectives come in a later report (`Remembered`)."""
        if located.look == self.look:
            self.located[rank] = located
            if rank not in self.final:
                self.remembered.pop(rank, None)  # the answer to an earlier order
        self.note_moves(rank, located.num_moves)

    def note_remembered(self, rank: int, said: Remembered) -> None:
        """Record a rank's newest collectives."""
        self.remembered[rank] = said.recalled
        if said.is_final:
            self.final[rank] = said.recalled

    def note_ready(self, rank: int) -> None:
        """Record that a rank has joined the process group."""
        self.ready.add(rank)
        if self.is_formed:
            self.stillness = Stillness(self.places, self.clock())

    def note_sign_of_life(self) -> None:
        """Restart all ranks' hang timeout after a debugger's prompt or a commit, which may have blocked ranks."""
        if self.stillness is not None:
            self.hangs_at = 0.0
            self.stillness.restart(self.clock())
        else:
            self.began_at = self.clock()

    def note_moves(self, rank: int, num_moves: int) -> None:
        """Record a rank's number of signs of life. Ignored until all ranks have joined the process group."""
        if self.stillness is not None:
            self.stillness.note(rank, num_moves, self.clock())

    def note_failure(self, rank: int, failure: Failure) -> None:
        """Record that a rank's function has raised an exception."""
        self.failures[rank] = failure
        self.remembered[rank] = self.final[rank] = failure.recalled
        self.prompts.forget(rank)
        self._has_independent_failure |= not failure.is_consequence

    def begin_call(self) -> None:
        """Record that all ranks of a staying gang begin a call."""
        self.at_rest.clear()
        self.steps.clear()  # an asynchronous save reports after its call's end, too
        self.note_sign_of_life()

    def end_call(self) -> None:
        """Forget the exceptions and steps of a staying gang's call, which are no cause of a later loss."""
        self.call_failures.clear()
        self.steps.clear()

    def note_call_failure(self, rank: int, failure: Failure) -> None:
        """Record that a call of a staying gang has raised an exception in a rank, which lives on."""
        self.call_failures[rank] = failure
        self.hangs_at = 0.0  # the other ranks get less time from now on

    def exit_in_call(self, rank: int) -> RankExit:
        """Return the end of the present call in a rank that has raised an exception, in the form of an exit."""
        return self._exit(rank, exitcode=1, log_tail="", time=time.time())

    def explain_failure(self) -> None:
        """Set `difference` if a mismatch of the ranks' collectives may explain a failure."""
        stacks = {rank: located.stacks for rank, located in self.located.items()}
        failed = [rank for rank, failure in self.failures.items() if failure.is_consequence]
        self.difference = explain_failure(self.remembered, failed, stacks)

    def note_shards(
        self, rank: int, said: WrittenShards | ShardsNotWritten
    ) -> dict[int, WrittenShards | ShardsNotWritten] | None:
        """Record a rank's report about its part of a sharded checkpoint.

        Returns:
            All ranks' reports once every rank has reported, else None.
        """
        all_said = self.shards.setdefault(said.number, {})
        all_said[rank] = said
        if len(all_said) < len(self.places):
            return None
        return self.shards.pop(said.number)

    def note_exit(self, exited: Exited) -> None:
        """Record a rank's exit."""
        self._note(**vars(exited))

    def lose(self, worker: str, agent_traceback: str | None = None) -> None:
        """Record exits for a worker's ranks after the worker was lost or its agent failed."""
        for rank in self.ranks_of.get(worker, ()):
            if rank not in self.exits:
                self._note(rank, exitcode=None, log_tail="", time=time.time(), agent_traceback=agent_traceback)

    def unaccounted(self) -> set[str]:
        """Return the workers with ranks that have yet to end."""
        return {node.worker for rank, (_, node) in self.places.items() if rank not in self.exits}

    def have_answered(self, answers: Mapping[int, Any]) -> bool:
        """Return True if every rank has an entry in `answers`, or has failed or exited."""
        if len(answers) + len(self.exits) + len(self.failures) < len(self.places):
            return False  # quick: a large gang calls this once for each answer
        return all(rank in answers or rank in self.exits or rank in self.failures for rank in self.places)

    def root_failure(self) -> RankExit:
        """Return the exit that, as far as known, caused the others."""
        here = {
            rank: exit_
            for rank, exit_ in self.exits.items()
            if rank not in self.results or exit_.exitcode != 0 or exit_.hang is not None
        }
        failed = {*self.failures, *self.call_failures, *([self.hang[0]] if self.hang else [])}
        for rank in failed - here.keys():  # not ended yet
            here[rank] = self._exit(rank, exitcode=1, log_tail="", time=time.time())
        root_failure = find_root_failure(here.values())
        if not root_failure.may_be_of_collective:
            return root_failure
        returned = {rank: self.final.get(rank) for rank in self.results if rank != root_failure.rank}
        left_by = left_waiting(root_failure.rank, root_failure.failure, returned) if root_failure.failure else ""
        return replace(root_failure, difference=self.difference, left_by=left_by)

    def not_formed(self, timeout: float, missing: Collection[int]) -> GangStartError:
        """Return the error that names ranks missing from the process group, with their last log lines."""
        tails = [f"rank {rank}: {self._tail_of(rank) or '(no output)'}" for rank in sorted(missing)[:4]]
        return GangStartError(
            f"{len(self.places) - len(missing)} of {len(self.places)} ranks met within {timeout:g} s; missing: "
            f"{', '.join(map(str, sorted(missing)))}. They may not reach each other: check network policies. Or "
            "importing the function's module takes too long: raise Gang(start_timeout=...).\n" + "\n".join(tails),
            rank=min(missing),
        )

    def _tail_of(self, rank: int) -> str:
        return self.exits[rank].log_tail if rank in self.exits else ""

    def _note(self, rank: int, **how: Any) -> None:
        self.prompts.forget(rank)
        self.exits[rank] = exit_ = self._exit(rank, **how)
        if self.is_program and exit_.exitcode == 0:  # by `os._exit`, or as another program after `os.execv`
            self.results.setdefault(rank, NONE)
        if rank not in self.results or (self.is_program and exit_.exitcode and not exit_.stopped):
            self._bad_exits[rank] = exit_
            self._has_independent_failure |= not exit_.is_consequence

    def _exit(self, rank: int, **how: Any) -> RankExit:
        place, node = self.places[rank]
        return RankExit(
            rank=rank,
            worker=node.worker,
            host=node.host,
            failure=self.failures.get(rank) or self.call_failures.get(rank),
            hang=self.hang[1] if self.hang is not None and self.hang[0] == rank else None,
            step=self.steps.get(rank),
            gpu=node.title_of(place.gpu) if place.gpu is not None else "",
            **how,
        )
