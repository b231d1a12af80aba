"""One attempt of a gang: which ranks there are, and what has become of them. Runs in the driver.

The brain tells it what happens, and it says what that means; what all ranks are to know is told to their agents here.
"""

import functools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flytekitplugins.daskpytorch.driver.agents import Peer
from flytekitplugins.daskpytorch.driver.blame import find_root_failure
from flytekitplugins.daskpytorch.driver.hang_detector import Stillness, explain_failure
from flytekitplugins.daskpytorch.errors import GangStartError
from flytekitplugins.daskpytorch.goodput import Goodput
from flytekitplugins.daskpytorch.protocol.collectives import Recalled
from flytekitplugins.daskpytorch.protocol.failure import Failure, RankExit
from flytekitplugins.daskpytorch.protocol.messages import Exited, ToAgent
from flytekitplugins.daskpytorch.protocol.orders import Arrived
from flytekitplugins.daskpytorch.protocol.placement import GpuKey, Node, Place
from flytekitplugins.daskpytorch.protocol.reports import Located, ShardsNotWritten, Wanted
from flytekitplugins.daskpytorch.protocol.sharded import WrittenShards

KEPT_FOR = 1.0
"""Seconds for a rank that steps to come back before another has its turn: it may wait for just that one."""


@dataclass
class Prompts:
    """Whose debugger has the terminal: one rank's of the attempt at a time."""

    clock: Callable[[], float]
    shown: int | None = None
    """The rank whose prompt is to be seen."""
    debugged: set[int] = field(default_factory=set)
    """Ranks that somebody looks at, or will: they stand still, and the others wait for them."""
    _waiting: list[int] = field(default_factory=list)
    _kept_for: int | None = None
    _kept_until: float = 0.0

    def ask(self, rank: int) -> None:
        """A rank wants the terminal."""
        self.debugged.add(rank)
        self._waiting.append(rank)

    def leave(self, rank: int, *, steps: bool) -> None:
        """A rank goes on; if it steps, it will ask again."""
        if rank == self.shown:
            self.shown = None
        if steps:
            self._kept_for, self._kept_until = rank, self.clock() + KEPT_FOR
        else:
            self.debugged.discard(rank)

    def forget(self, rank: int) -> None:
        """A rank has gone."""
        self._waiting = [other for other in self._waiting if other != rank]
        self.leave(rank, steps=False)

    @property
    def due(self) -> float | None:
        """When somebody else may have the terminal, though nothing happens."""
        return self._kept_until if self._waiting and self.shown is None else None

    def turn(self) -> int | None:
        """The rank that is to have it now, from which it is not taken again; None: nobody else."""
        if self.shown is not None or not self._waiting:
            return None
        is_kept = self._kept_for in self.debugged and self.clock() < self._kept_until
        if is_kept and self._kept_for not in self._waiting:
            return None
        self.shown = self._kept_for if is_kept and self._kept_for is not None else self._waiting[0]
        self._waiting.remove(self.shown)
        return self.shown


@dataclass
class Attempt:
    """What has happened to the ranks of one attempt."""

    number: int
    places: dict[int, tuple[Place, Node]]
    """rank -> its place, and the node of its worker."""
    carriers: Sequence[Peer] = ()
    """The agents that have been given its ranks, those among them that have gone included."""
    has_observers: bool = False
    """Rank 0 has observers, which have something to close at its end."""
    ready: set[int] = field(default_factory=set)
    """Ranks that have joined the process group."""
    results: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    exits: dict[int, RankExit] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    hang: tuple[int, str] | None = None
    """The rank that holds up the others, and the report."""
    difference: str | None = None
    """What differs in the ranks' collectives, one of which has failed."""
    is_deadlock: bool = False
    """The hang is proven: its ranks wait for ever, and would so in each attempt."""
    held: dict[int, int] = field(default_factory=dict)
    """How often each rank has called `should_stop`, once it was asked to hold."""
    wanted: list[tuple[Peer, int, Wanted]] = field(default_factory=list)
    """Which checkpoints ranks wait for, by their agents."""
    chosen: dict[int, Arrived] = field(default_factory=dict)
    """By the numbers of such requests, what rank 0 has got, and others get."""
    accounts: dict[int, Goodput] = field(default_factory=dict)
    """By the numbers of such requests, where ranks were told that the time has gone."""
    accounts_wanted: list[tuple[Peer, int]] = field(default_factory=list)
    """Such requests of other ranks than rank 0, answered when that one has next said what its time went into."""
    has_saved: bool = False
    """A checkpoint of its own is safe."""
    shards: dict[int, dict[int, WrittenShards | ShardsNotWritten]] = field(default_factory=dict)
    """Of each sharded checkpoint that is being written, by its number, what the ranks have said."""
    stopped_early: set[int] = field(default_factory=set)
    """Ranks whose `should_stop` has turned true."""
    located: dict[int, Located] = field(default_factory=dict)
    """Where each rank is, once it was asked."""
    stacks: dict[int, str] = field(default_factory=dict)
    """Tracebacks of ranks that did not answer that question, and were signalled."""
    remembered: dict[int, Recalled | None] = field(default_factory=dict)
    """The last collectives of each rank, once it was asked, or has failed."""
    standing: set[int] = field(default_factory=set)
    """Ranks that have entered no collective for seconds."""
    ask_at: float = math.inf
    """When to ask the ranks where they are, after a failure that may come of a collective; by the clock."""
    stillness: Stillness | None = None
    """From the moment that all have met."""
    hangs_at: float = 0.0
    """Not before this moment can it count as hung: ranks that have not ended only move on."""
    stop_at: float | None = None
    """When to end it: a better cause may be found before, or the last rank may leave; by the clock."""
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)
    began_at: float = field(init=False)
    """By the clock."""
    prompts: Prompts = field(init=False)
    _bad_exits: dict[int, RankExit] = field(default_factory=dict)
    _has_earnest_failure: bool = False

    def __post_init__(self) -> None:
        self.began_at = self.clock()
        self.prompts = Prompts(self.clock)

    @functools.cached_property
    def ranks_of(self) -> Mapping[str, list[int]]:
        """The workers that carry it, each with its ranks."""
        ranks = defaultdict(list)
        for rank, (_, node) in self.places.items():
            ranks[node.worker].append(rank)
        return ranks

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.places)

    @property
    def is_formed(self) -> bool:
        """All ranks have met."""
        return len(self.ready) == len(self.places)

    @property
    def has_delivered(self) -> bool:
        """Every rank's function has returned."""
        return len(self.results) == len(self.places)

    @property
    def is_over(self) -> bool:
        """Every rank has left."""
        return len(self.exits) == len(self.places)

    @property
    def running(self) -> list[int]:
        """Ranks whose function has neither returned nor failed."""
        ended = self.results.keys() | self.exits.keys() | self.failures.keys()
        return [rank for rank in self.places if rank not in ended]

    @property
    def bad_exits(self) -> list[RankExit]:
        """Exits without a result. A rank that has delivered is out of danger, whatever happens to it then."""
        return list(self._bad_exits.values())

    @property
    def unclean_exits(self) -> list[RankExit]:
        """All but the exits of ranks that delivered and left in good order: what the blame is found among."""
        return [
            exit_
            for rank, exit_ in self.exits.items()
            if rank not in self.results or exit_.exitcode != 0 or exit_.hang is not None
        ]

    @property
    def is_failing(self) -> bool:
        """Something has gone wrong."""
        return bool(self.failures or self._bad_exits or self.hang)

    @property
    def has_earnest_failure(self) -> bool:
        """Some rank failed, and not because it lost a peer."""
        return self.hang is not None or self._has_earnest_failure

    @property
    def has_own_failure(self) -> bool:
        """Some rank failed, not because it lost a peer, nor because anything was taken away from it."""
        return self.has_earnest_failure and not self.root_failure().is_infrastructure

    @property
    def faulty_gpus(self) -> set[GpuKey]:
        """The own GPUs of ranks that have ended because their GPU failed."""
        placed = [self.places[exit_.rank] for exit_ in self.bad_exits if exit_.gpu_fault]
        return {node.key_of(place.gpu) for place, node in placed if place.gpu is not None}

    def tell(self, message: ToAgent) -> None:
        """Tell all agents that carry its ranks; those of newcomers wait for orders of their own."""
        for peer in self.carriers:
            peer.send(message)

    def note_ready(self, rank: int) -> None:
        """A rank has joined the process group."""
        self.ready.add(rank)
        if self.is_formed:
            self.stillness = Stillness(self.places, self.clock())

    def note_stirring(self) -> None:
        """A debugger or a commit is done: for all ranks, which may have waited for it, silence is counted from here."""
        if self.stillness is not None:
            self.hangs_at = 0.0
            self.stillness.restart(self.clock())
        else:
            self.began_at = self.clock()

    def note_moves(self, rank: int, num_moves: int) -> None:
        """A rank has given so many signs of life; they count from the moment that all have met."""
        if self.stillness is not None:
            self.stillness.note(rank, num_moves, self.clock())

    def note_failure(self, rank: int, failure: Failure) -> None:
        """A rank's function has raised an exception."""
        self.failures[rank] = failure
        self.remembered[rank] = failure.recalled
        self.prompts.forget(rank)
        self._has_earnest_failure |= not failure.is_consequence

    def explain_failure(self) -> None:
        """Find what differs in the ranks' collectives, if that is what a rank may have failed of."""
        stacks = {rank: located.stacks for rank, located in self.located.items()}
        failed = [rank for rank, failure in self.failures.items() if failure.is_consequence]
        self.difference = explain_failure(self.remembered, failed, stacks)

    def note_shards(
        self, rank: int, said: WrittenShards | ShardsNotWritten
    ) -> dict[int, WrittenShards | ShardsNotWritten] | None:
        """A rank has written its part of a sharded checkpoint, or has not; what all have said, once they have."""
        all_said = self.shards.setdefault(said.number, {})
        all_said[rank] = said
        if len(all_said) < len(self.places):
            return None
        return self.shards.pop(said.number)

    def note_exit(self, exited: Exited) -> None:
        """A rank ended."""
        self._note(**vars(exited))

    def lose(self, worker: str, agent_traceback: str | None = None) -> None:
        """A worker has gone, or its agent has failed, and its ranks with it."""
        for rank in self.ranks_of.get(worker, ()):
            if rank not in self.exits:
                self._note(rank, exitcode=None, log_tail="", time=time.time(), agent_traceback=agent_traceback)

    def unaccounted(self) -> set[str]:
        """The workers of ranks that have not left."""
        return {node.worker for rank, (_, node) in self.places.items() if rank not in self.exits}

    def have_answered(self, answers: Mapping[int, Any]) -> bool:
        """Whether all ranks that can still answer a question have done so."""
        if len(answers) + len(self.exits) + len(self.failures) < len(self.places):
            return False  # as for most of a large gang's answers, without going through all
        return all(rank in answers or rank in self.exits or rank in self.failures for rank in self.places)

    def root_failure(self) -> RankExit:
        """Whose fault it is, as far as is known."""
        here = {exit_.rank: exit_ for exit_ in self.unclean_exits}
        for rank in {*self.failures, *([self.hang[0]] if self.hang else [])} - here.keys():  # still on their way out
            here[rank] = self._exit(rank, exitcode=1, log_tail="", time=time.time())
        root_failure = find_root_failure(here.values())
        return replace(root_failure, difference=self.difference) if root_failure.may_be_of_collective else root_failure

    def not_formed(self, timeout: float, missing: Collection[int]) -> GangStartError:
        """The error that says which ranks have not met the others in time, and what those wrote."""
        tails = [f"rank {rank}: {self._tail_of(rank) or '(no output)'}" for rank in sorted(missing)[:4]]
        return GangStartError(
            f"{len(self.places) - len(missing)} of {len(self.places)} ranks met within {timeout:g} s; missing: "
            f"{', '.join(map(str, sorted(missing)))}. They may not reach each other, or importing the function's "
            "module takes too long.\n" + "\n".join(tails),
            rank=min(missing),
        )

    def _tail_of(self, rank: int) -> str:
        return self.exits[rank].log_tail if rank in self.exits else ""

    def _note(self, rank: int, **how: Any) -> None:
        self.prompts.forget(rank)
        self.exits[rank] = exit_ = self._exit(rank, **how)
        if rank not in self.results:
            self._bad_exits[rank] = exit_
            self._has_earnest_failure |= not exit_.is_consequence

    def _exit(self, rank: int, **how: Any) -> RankExit:
        place, node = self.places[rank]
        return RankExit(
            rank=rank,
            worker=node.worker,
            host=node.host,
            failure=self.failures.get(rank),
            hang=self.hang[1] if self.hang is not None and self.hang[0] == rank else None,
            is_deadlock=self.is_deadlock and self.hang is not None and self.hang[0] == rank,
            step=self.steps.get(rank),
            gpu=node.title_of(place.gpu) if place.gpu is not None else "",
            **how,
        )
