"""State of one attempt of a gang, in which the driver's thread records events. Runs in the driver."""

import functools
import pickle
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flytekitplugins.daskpytorch.driver.agents import Peer
from flytekitplugins.daskpytorch.driver.blame import find_root_failure
from flytekitplugins.daskpytorch.errors import GangStartError
from flytekitplugins.daskpytorch.protocol.failure import Failure, RankExit
from flytekitplugins.daskpytorch.protocol.messages import Answer, Ask, Question, Tell, ToAgent
from flytekitplugins.daskpytorch.protocol.placement import Node, Place

NONE = pickle.dumps(None)


class Answers(dict[int, Any]):
    """Answers to one question, by rank."""


@dataclass
class Attempt:
    """Times are seconds on the driver's clock, unless stated otherwise."""

    number: int
    places: dict[int, tuple[Place, Node]]
    carriers: Sequence[Peer] = ()
    has_observers: bool = False
    is_program: bool = False
    """The ranks run a script or module: the exit code of a rank's process is its result."""
    ready: set[int] = field(default_factory=set)
    results: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    survived: dict[int, Failure] = field(default_factory=dict)
    """Exceptions that leave their ranks alive, and the gang too, unless other ranks wait for ever."""
    exits: dict[int, RankExit] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    at_rest: set[int] = field(default_factory=set)
    """Ranks that have nothing to do until the driver's next order."""
    hang: tuple[int, str] | None = None
    """The rank that holds up the gang, and the report."""
    ended_for: str | None = None
    """Reason to end a healthy attempt and go on with another."""
    has_progressed: bool = False
    adapts: bool = False
    has_stopped_early: bool = False
    stop_at: float | None = None
    """Time to stop all ranks: end of the search for a failure's cause, or of the wait for exits."""
    excused_at: float = field(init=False)
    """Time until which something other than the ranks has delayed them, such as the rendezvous."""
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)
    began_at: float = field(init=False)
    """`start_timeout` counts from here. Delays that are no fault of the ranks move it on."""
    on_over: Callable[[int, Failure | None], object] = field(default=lambda *_: None, repr=False)
    explain: Callable[[RankExit], RankExit] = field(default=lambda exit_: exit_, repr=False)
    _num_asked: int = 0
    _answers: weakref.WeakValueDictionary[int, Answers] = field(default_factory=weakref.WeakValueDictionary)
    _bad_exits: dict[int, RankExit] = field(default_factory=dict)
    """Exits without a result. After a function's result, its rank's exit counts as good."""

    def __post_init__(self) -> None:
        self.began_at = self.excused_at = self.clock()

    @functools.cached_property
    def ranks_of(self) -> Mapping[str, list[int]]:
        ranks = defaultdict(list)
        for rank, (_, node) in self.places.items():
            ranks[node.worker].append(rank)
        return ranks

    @property
    def world_size(self) -> int:
        return len(self.places)

    @property
    def is_formed(self) -> bool:
        return len(self.ready) == len(self.places)

    @property
    def has_delivered(self) -> bool:
        return len(self.results) == len(self.places)

    @property
    def is_over(self) -> bool:
        return len(self.exits) == len(self.places)

    @property
    def running(self) -> list[int]:
        ended = self.results.keys() | self.exits.keys() | self.failures.keys() | self.at_rest
        return [rank for rank in self.places if rank not in ended]

    @property
    def is_failing(self) -> bool:
        return bool(self.failures or self._bad_exits or self.hang)

    @property
    def has_independent_failure(self) -> bool:
        if self.hang is not None or not all(failure.is_consequence for failure in self.failures.values()):
            return True
        return not all(exit_.is_consequence for exit_ in self._bad_exits.values())

    @property
    def faulty(self) -> set[str]:
        return {exit_.worker for exit_ in self._bad_exits.values() if exit_.gpu_fault}

    def tell(self, message: ToAgent) -> None:
        for peer in self.carriers:
            peer.send(message)

    def ask(self, question: Question, about: Any = None) -> Answers:
        self._num_asked += 1
        self._answers[self._num_asked] = answers = Answers()
        self.tell(Tell(Ask(question, self._num_asked, about)))
        return answers

    def note_answer(self, rank: int, answer: Answer) -> None:
        if (answers := self._answers.get(answer.number)) is not None:
            answers[rank] = answer.value

    def excuse(self) -> None:
        self.excused_at = self.clock()
        if not self.is_formed:
            self.began_at = self.excused_at

    def note_failure(self, rank: int, failure: Failure) -> None:
        self.failures[rank] = failure
        self.on_over(rank, failure)

    def exit_of_survivor(self, rank: int) -> RankExit:
        return self._completed(RankExit(rank=rank, exitcode=1))

    def note_exit(self, reported: RankExit) -> None:
        rank = reported.rank
        self.exits[rank] = exit_ = self._completed(reported)
        if self.is_program and exit_.exitcode == 0:  # by `os._exit`
            self.results.setdefault(rank, NONE)
        if rank not in self.results or (self.is_program and exit_.exitcode and not exit_.stopped):
            self._bad_exits[rank] = exit_
        self.on_over(rank, None)

    def lose(self, worker: str, agent_traceback: str | None = None) -> None:
        for rank in self.ranks_of.get(worker, ()):
            if rank not in self.exits:
                self.note_exit(RankExit(rank=rank, exitcode=None, agent_traceback=agent_traceback))

    def unaccounted(self) -> set[str]:
        return {node.worker for rank, (_, node) in self.places.items() if rank not in self.exits}

    def have_answered(self, answers: Mapping[int, Any]) -> bool:
        if len(answers) + len(self.exits) + len(self.failures) < len(self.places):
            return False  # quick: a large gang calls this once for each answer
        return all(rank in answers or rank in self.exits or rank in self.failures for rank in self.places)

    def root_failure(self) -> RankExit:
        here = {
            rank: exit_
            for rank, exit_ in self.exits.items()
            if rank not in self.results or exit_.exitcode != 0 or exit_.hang is not None
        }
        failed = {*self.failures, *self.survived, *([self.hang[0]] if self.hang else [])}
        here |= {rank: self.exit_of_survivor(rank) for rank in failed - here.keys()}  # not ended yet
        return self.explain(find_root_failure(here.values()))

    def not_formed(self, timeout: float, missing: Collection[int]) -> GangStartError:
        return GangStartError(
            f"{len(self.places) - len(missing)} of {len(self.places)} ranks met within {timeout:g} s; missing: "
            f"{', '.join(map(str, sorted(missing)))}. They may not reach each other: check network policies. Or "
            "importing the function's module takes too long: raise Gang(start_timeout=...). Their log may say more.",
            rank=min(missing),
        )

    def _completed(self, exit_: RankExit) -> RankExit:
        rank = exit_.rank
        place, node = self.places[rank]
        return replace(
            exit_,
            worker=node.worker,
            host=node.host,
            failure=self.failures.get(rank) or self.survived.get(rank),
            hang=self.hang[1] if self.hang is not None and self.hang[0] == rank else None,
            step=self.steps.get(rank),
            gpu=node.title_of(place.gpu) if place.gpu is not None else "",
        )
