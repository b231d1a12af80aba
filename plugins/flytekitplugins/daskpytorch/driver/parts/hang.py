"""Watches one attempt for hangs, and finds the collectives that explain a failure. Runs in the driver."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from flytekitplugins.daskpytorch.driver.agents import Peer
from flytekitplugins.daskpytorch.driver.attempt import Attempt
from flytekitplugins.daskpytorch.driver.collectives import (
    WAITING_FILES,
    Difference,
    awaits_returned,
    compare,
    left_waiting,
    named,
    users_frames,
)
from flytekitplugins.daskpytorch.driver.part import ANSWER_TIME, Moment, Part, Stage
from flytekitplugins.daskpytorch.driver.state import GangState
from flytekitplugins.daskpytorch.protocol.failure import Failure, RankExit, Recalled
from flytekitplugins.daskpytorch.protocol.job import Job
from flytekitplugins.daskpytorch.protocol.messages import Beat, Question

STACKS_WAIT = 1.5
"""Seconds that ranks which may hang have to send their stacks."""
LEFT_TIMEOUT = 20.0
"""Minimum timeout in seconds after a staying gang's call has failed in a rank."""
RETURNED_INTERVAL = 5.0
"""Seconds between two looks at ranks that NCCL may let wait for a rank that has returned."""


class Look:
    def __init__(self, attempt: Attempt, known: Mapping[int, Recalled | None]) -> None:
        self._attempt = attempt
        self._known = known
        self.located = attempt.ask(Question.STACKS)
        self.recalled = attempt.ask(Question.COLLECTIVES)
        self.ends_at = attempt.clock() + STACKS_WAIT

    @property
    def remembered(self) -> dict[int, Recalled | None]:
        """None: torch does not record collectives."""
        return {**self.recalled, **self._known}

    @property
    def is_answered(self) -> bool:
        return self._attempt.have_answered(self.located) and self._attempt.have_answered(self.remembered)


class HangWatch(Part):
    """After the hang timeout, asks all ranks for stacks and collectives, which decide whether the attempt hangs.

    After a failure that a collective may have caused, they may tell the reason. Once a rank with NCCL has returned,
    they prove that others wait for its call: such a rank stays, as its peers may still read its GPU's memory. With
    gloo, it closes its connections, and its peers' collectives fail.
    """

    takes = (Beat, Recalled)

    def __init__(self, state: GangState) -> None:
        self._state = state
        self._timeout: float | Literal["auto"] | None = state.request.settings.hang_timeout

    def equip(self, job: Job) -> Job:
        self._uses_nccl = job.backend == "nccl"
        return job

    def begin(self, attempt: Attempt) -> None:
        self._stillness = Stillness(attempt.places, attempt.clock())
        self._hangs_at = 0.0
        """Earliest time at which the attempt may be declared hung. Progress only makes it later."""
        self._seen: object = None
        self._waits: Mapping[int, frozenset[tuple[str, int]]] | None = None
        """Collectives in which each rank waited when the last hang was suspected. None if a rank was working."""
        self._look: Look | None = None
        self._search: Look | None = None
        self._returned_at = math.inf
        """Time of the next look at ranks that may wait for one that has returned."""
        self._left: tuple[int, str] | None = None
        """Rank that waited in the newest such look, and the proof."""
        self._final: dict[int, Recalled | None] = {}
        self._difference: str | None = None
        attempt.explain = self._explain

    # ---- what happens

    def take(self, peer: Peer, attempt: Attempt, rank: int, report: object) -> None:
        if isinstance(report, Beat):
            self._note_moves(attempt, rank, report.num_moves[rank])
        elif isinstance(report, Recalled):
            self._final[rank] = report

    def rank_over(self, attempt: Attempt, rank: int, failure: Failure | None) -> None:
        if failure is not None:
            self._final[rank] = failure.recalled

    def enter(self, stage: Stage) -> None:
        if stage == "stopping":
            self._look = None
        attempt = self._state.attempt
        if stage == "settling" and attempt is not None and attempt.is_failing and attempt.hang is None:
            failed = [rank for rank, failure in attempt.failures.items() if failure.is_consequence]
            located = self._search.located if self._search is not None else {}
            stacks = {rank: each.stacks for rank, each in located.items()}
            self._difference = explain_failure(self._remembered, failed, stacks)

    def _note_moves(self, attempt: Attempt, rank: int, num_moves: int) -> None:
        self._stillness.excuse(attempt.excused_at)
        self._stillness.note(rank, num_moves, attempt.clock())

    # ---- after a failure

    def orders(self, now: float) -> None:
        attempt = self._state.training
        if attempt is not None and self._search_at(attempt) <= now:
            self._search = Look(attempt, self._final)

    def _search_at(self, attempt: Attempt) -> float:
        is_needed = self._search is None and attempt.is_failing
        return attempt.stop_at - ANSWER_TIME if is_needed and attempt.stop_at is not None else math.inf

    def blocks(self, moment: Moment) -> bool:
        attempt = self._state.attempt
        return moment is Moment.STOP and attempt is not None and not attempt.have_answered(self._remembered)

    @property
    def _remembered(self) -> Mapping[int, Recalled | None]:
        return self._search.remembered if self._search is not None else self._final

    def _explain(self, root_failure: RankExit) -> RankExit:
        attempt = self._state.attempt
        if self._left is not None and root_failure.hang == self._left[1] and root_failure.failure is None:
            return replace(root_failure, left_by=self._left[1])
        if attempt is None or not root_failure.may_be_of_collective:
            return root_failure
        returned = {rank: self._final.get(rank) for rank in attempt.results if rank != root_failure.rank}
        left_by = left_waiting(root_failure.rank, root_failure.failure, returned) if root_failure.failure else ""
        return replace(root_failure, difference=self._difference, left_by=left_by)

    # ---- hangs

    def ends(self, attempt: Attempt) -> bool | None:
        """Return True and set `attempt.hang` if the attempt hangs, after a first call has asked for stacks."""
        if self._look is None:
            if attempt.clock() < self._look_at(attempt):
                return None
            self._look = Look(attempt, self._final)
        look = self._look
        if not look.is_answered and attempt.clock() < look.ends_at:
            return None
        self._look = None
        if not self._is_left(attempt, look) and not self._is_silent(attempt, look):
            return None
        attempt.ask(Question.STACKS, True)  # for the log
        return True

    def due(self, attempt: Attempt) -> float | None:
        if self._look is not None:
            return self._look.ends_at
        due_at = min(self._look_at(attempt), self._search_at(attempt))
        return due_at if due_at < math.inf else None

    def _look_at(self, attempt: Attempt) -> float:
        if self._uses_nccl and attempt.results:
            if self._returned_at == math.inf or self._state.blocks(Moment.HUNG):
                self._returned_at = attempt.clock() + RETURNED_INTERVAL
            if attempt.running:
                return min(self._silent_until(attempt), self._returned_at)
        return self._silent_until(attempt)

    def _is_left(self, attempt: Attempt, look: Look) -> bool:
        if attempt.clock() < self._returned_at:
            return False
        before, self._left = self._left, awaits_returned(look.recalled, attempt.running)
        self._returned_at = attempt.clock() + RETURNED_INTERVAL
        attempt.hang = self._left if self._left == before else None
        return attempt.hang is not None

    def _silent_until(self, attempt: Attempt) -> float:
        """Return from when a silent gang counts as hung, or with `auto` is asked for its stacks."""
        if self._timeout is None or not attempt.is_formed or self._state.blocks(Moment.HUNG):
            return math.inf
        if (seen := (attempt.excused_at, len(attempt.survived), len(attempt.at_rest))) != self._seen:
            self._seen, self._hangs_at = seen, 0.0
            self._stillness.excuse(attempt.excused_at)
        if attempt.clock() >= self._hangs_at:  # avoids a loop over all ranks
            self._hangs_at = self._stillness.hangs_at(attempt.running, self._timeout, self._least(attempt))
        return self._hangs_at

    @staticmethod
    def _least(attempt: Attempt) -> float:
        return LEFT_TIMEOUT if attempt.survived else LEAST_TIMEOUT

    def _is_silent(self, attempt: Attempt, look: Look) -> bool:
        if attempt.clock() < self._silent_until(attempt):
            return False
        for rank, located in look.located.items():
            self._note_moves(attempt, rank, located.num_moves)
        states = self._states(attempt, look)
        self._hangs_at = 0.0  # ranks may have moved since
        if attempt.clock() < self._silent_until(attempt):
            return False
        if self._timeout == "auto" and not self._are_stuck(states):
            self._hangs_at = attempt.clock() + self._least(attempt) / 10
            return False
        attempt.hang = report_hang(states, self._timeout or "auto")
        return True

    def _are_stuck(self, states: Mapping[int, RankState]) -> bool:
        """Ranks that all wait in the same collectives as before cannot continue."""
        before, self._waits = self._waits, waits_of(states)
        return self._waits is not None and self._waits == before

    def _states(self, attempt: Attempt, look: Look) -> dict[int, RankState]:
        now = attempt.clock()
        located, remembered = look.located, look.remembered
        return {
            rank: RankState(
                is_done=rank in attempt.results or rank in attempt.at_rest,
                has_answered=rank in located,
                still_for=self._stillness.still_for(rank, now),
                stacks=located[rank].stacks if rank in located else "it did not answer",
                recalled=remembered.get(rank),
            )
            for rank in attempt.places
        }


# ---- Which rank is silent, and which one blocks the others: pure functions

NUM_INNER_FRAMES = 2

LEAST_TIMEOUT = 300.0
SLOWNESS = 10.0
"""Multiple of the longest time between two signs of life of a rank that counts as a hang with `hang_timeout="auto"`."""
ENDED = "whose function has ended"
MAX_FRAMES = 10
"""Stack frames per rank in a report. The rank's log contains all frames."""


class Stillness:
    slowest: float = 0.0
    """Longest time between two signs of life of one rank so far."""

    def __init__(self, ranks: Iterable[int], now: float) -> None:
        self._num_moves = dict.fromkeys(ranks, -1)
        self._moved_at = dict.fromkeys(self._num_moves, now)
        self._excused_at = now

    def excuse(self, until: float) -> None:
        if until > self._excused_at:
            self._excused_at = until
            self._moved_at = {rank: max(at, until) for rank, at in self._moved_at.items()}

    def note(self, rank: int, num_moves: int, now: float) -> None:
        if num_moves > self._num_moves[rank]:
            self.slowest = max(self.slowest, self.still_for(rank, now))
            self._num_moves[rank], self._moved_at[rank] = num_moves, now

    def hangs_at(self, ranks: Iterable[int], timeout: float | Literal["auto"], least: float = LEAST_TIMEOUT) -> float:
        """Return when these ranks count as hung if all stay silent. Infinity without ranks.

        With a timeout in seconds, the longest silence decides. With `auto`, the shortest decides, but at least `least`
        seconds.
        """
        moved_at = [self._moved_at[rank] for rank in ranks]
        if not moved_at:
            return math.inf
        if timeout == "auto":
            return max(moved_at) + max(least, SLOWNESS * self.slowest)
        return min(moved_at) + timeout

    def still_for(self, rank: int, now: float) -> float:
        return now - self._moved_at[rank]


@dataclass(frozen=True, kw_only=True)
class RankState:
    is_done: bool
    has_answered: bool
    still_for: float
    stacks: str
    """Tracebacks of the rank's threads, written by faulthandler, or a short message."""
    recalled: Recalled | None = None


def waits_of(states: Mapping[int, RankState]) -> Mapping[int, frozenset[tuple[str, int]]] | None:
    """Return the collectives (group, number) in which each running rank waits. None if a rank may be working."""
    running = {rank: state.recalled for rank, state in states.items() if not state.is_done}
    waits = {rank: _waits(recalled) for rank, recalled in running.items() if recalled is not None}
    return waits if len(waits) == len(running) and all(waits.values()) else None


def _waits(recalled: Recalled) -> frozenset[tuple[str, int]]:
    return frozenset((each.group, each.number) for each in recalled.collectives if not each.is_done)


def report_hang(states: Mapping[int, RankState], hang_timeout: float | Literal["auto"]) -> tuple[int, str]:
    difference = compare({rank: state.recalled for rank, state in states.items() if state.recalled is not None})
    rank, why = find_hung(states, difference)
    still = max((state.still_for for state in states.values() if not state.is_done), default=0.0)
    told = f"no sign of life for {still:.1f} s (hang_timeout={hang_timeout!r}); {why}"
    shown = f"{difference.shown}\n\n" if difference is not None else ""
    return rank, f"it hangs, or holds up the others: {told}\n{shown}{_doings(states)}"


def explain_failure(
    recalled: Mapping[int, Recalled | None], failed: Collection[int], stacks: Mapping[int, str]
) -> str | None:
    difference = compare({rank: each for rank, each in recalled.items() if each is not None}, failed)
    if difference is None:
        return None
    told = f"{difference.what}\n{difference.shown}"
    frames = users_frames(main_frames(stacks.get(difference.rank, "")))
    return told + (f"\nrank {difference.rank} was in:{_indented(frames[:MAX_FRAMES])}" if frames else "")


def _indented(lines: Iterable[str]) -> str:
    return "".join(f"\n  {line}" for line in lines)


def _doings(states: Mapping[int, RankState]) -> str:
    doing: dict[str, list[int]] = defaultdict(list)
    for rank, state in states.items():
        doing[_doing(state)].append(rank)
    shown = "".join(f"\n\n{named(ranks)}, {what}" for what, ranks in doing.items())
    return f"What the main threads were doing, the innermost call first (all threads are in the log):{shown}"


def _doing(state: RankState) -> str:
    frames = main_frames(state.stacks)
    if not frames:
        return ENDED if state.is_done else state.stacks.strip() or "which showed no stacks"
    users = users_frames(frames)
    if state.is_done and not users:
        return ENDED
    title = "waiting for other ranks, called from" if _is_waiting(state.stacks) else "in"
    return f"{title}:{_indented((users or frames)[:MAX_FRAMES])}"


def find_hung(states: Mapping[int, RankState], difference: Difference | None = None) -> tuple[int, str]:
    """Return the rank that holds up the others, and the reason, by the first rule that finds a rank.

    1. A rank without an answer: suspended, or C code holds its interpreter.
    2. The rank whose recorded collectives differ from the other ranks'.
    3. A rank that waits for no other rank.
    4. The rank with the longest silence.
    """
    silent = [rank for rank, state in states.items() if not state.has_answered and not state.is_done]
    if silent:
        return silent[0], "it does not answer: suspended, or inside C code that holds the interpreter"
    if difference is not None:
        has_returned = states[difference.rank].is_done
        return difference.rank, f"{difference.what}{'; its function has returned' if has_returned else ''}"
    running = [rank for rank in states if not states[rank].is_done]
    outside = [rank for rank in running if not _is_waiting(states[rank].stacks)]
    rank = max(outside or running or states, key=lambda rank: states[rank].still_for)
    return rank, "it is not inside a collective" if outside else "all ranks wait for each other"


def _is_waiting(stacks: str) -> bool:
    """True in `all_reduce` or `backward`, for example."""
    return any(WAITING_FILES.search(frame) for frame in main_frames(stacks)[:NUM_INNER_FRAMES])


def main_frames(stacks: str) -> list[str]:
    _, header, frames = stacks.rstrip().rpartition("(most recent call first):")
    return [line.strip() for line in frames.strip().splitlines()] if header else []
