"""Proves deadlocks: ranks that wait in collectives that can never complete. Runs in the driver.

A rank whose function has returned calls no further collective. A rank whose main thread waits in one collective calls
no other. If every rank is of either kind, flight recorders show which collectives lack a rank for ever. Two equal
looks, a few seconds apart, prove the deadlock. If the state of any rank is unknown, `hang_timeout` decides instead.
"""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flytekitplugins.daskpytorch.driver.attempt import Attempt
from flytekitplugins.daskpytorch.driver.collectives import (
    NOT_THE_USERS,
    Difference,
    compare,
    essence,
    in_words,
    named,
)
from flytekitplugins.daskpytorch.driver.hang_detector import (
    COLLECTIVE_FILES,
    RankState,
    main_frames,
    other_frames,
    report_deadlock,
)
from flytekitplugins.daskpytorch.protocol import messages, orders
from flytekitplugins.daskpytorch.protocol.failure import MAX_COLLECTIVES, Collective

LOOK_INTERVAL = 3.0
"""Seconds between two looks at the ranks, the two of a proof included."""
MAX_INTERVAL = 30.0
"""Maximum number of seconds between two looks. The pause grows while looks find ranks at work, as in steps of several
minutes."""
NEEDS_ALL = re.compile(r"barrier|_?all_?reduce|_?all_?gather|_?reduce_?scatter")
"""Matches operations that complete only after every rank has called them."""
POINT_TO_POINT = re.compile(r'torch/distributed/distributed_c10d\.py", line \d+ in (recv|send)$')
PLACE = re.compile(r", line \d+ in ")


@dataclass(frozen=True)
class Look:
    """Snapshot of the running ranks' waits."""

    waits: Mapping[int, Collective | str]
    """The collective of each rank. For `recv` and `send`, which the flight recorder lacks, the name."""
    counts: Mapping[int, object]
    """Counters and stacks of each rank, which change with its progress."""


def look_at(states: Mapping[int, RankState]) -> Look | None:
    """Return the ranks' waits. None: a rank may be working, or its state is unknown."""
    if any(state.recalled is None or _has_other_threads(state.stacks) for state in states.values()):
        return None
    running = {rank: state for rank, state in states.items() if not state.is_done}
    waits = {rank: wait for rank, state in running.items() if (wait := _wait_of(state)) is not None}
    if not running or len(waits) < len(running):
        return None
    counts: dict[int, object] = {
        rank: (each.num_collectives, each.num_moves, each.stacks) for rank, each in running.items()
    }
    if any(isinstance(wait, str) for wait in waits.values()):  # recorders miss messages in transit
        received = {rank: state.num_bytes for rank, state in states.items()}
        if None in received.values():
            return None
        counts |= {rank: (counts.get(rank), num_bytes) for rank, num_bytes in received.items()}
    return Look(waits, counts)


def _has_other_threads(stacks: str) -> bool:
    """Return True if a thread beside the main thread may call collectives, or stacks are incomplete."""
    frames = other_frames(stacks)
    if not main_frames(stacks) or "..." in (frame.strip() for frame in stacks.splitlines()):
        return True
    return any(COLLECTIVE_FILES.search(frame) or not NOT_THE_USERS.search(frame) for frame in frames)


def _wait_of(state: RankState) -> Collective | str | None:
    frames, recalled = main_frames(state.stacks), state.recalled
    if recalled is None or not COLLECTIVE_FILES.search(frames[0]):
        return None
    for collective in reversed(recalled.collectives):
        if not collective.is_done and collective.group in recalled.members and _is_within(frames, collective.frames):
            return collective
    called = POINT_TO_POINT.search(frames[0])
    return called[1] if called is not None and recalled.members else None


def _is_within(frames: Sequence[str], recorded: Sequence[str]) -> bool:
    """Return True if the main thread is still in the recorded call. Only the innermost line number may differ."""
    if not recorded or len(recorded) > len(frames):
        return False
    return PLACE.split(frames[0]) == PLACE.split(recorded[0]) and list(frames[1 : len(recorded)]) == list(recorded[1:])


def prove(before: Look | None, look: Look | None, states: Mapping[int, RankState]) -> Difference | None:
    """Return the reason for a deadlock, and the rank to blame. None: no proof of a deadlock.

    Args:
        before: Previous look. None: no earlier look.
        look: The newest look. None: a rank may be working.
        states: State of each rank at the newest look.
    """
    if before is None or look is None or before.counts != look.counts or before.waits != look.waits:
        return None
    if not all(_is_hopeless(rank, wait, look, states) for rank, wait in look.waits.items()):
        return None
    for rank, wait in look.waits.items():
        if isinstance(wait, str):
            return _unmatched(rank, wait, look, states)
    recalled = {rank: state.recalled for rank, state in states.items() if state.recalled is not None}
    return compare(recalled)


def _unmatched(rank: int, call: str, look: Look, states: Mapping[int, RankState]) -> Difference:
    """Return the reason for a `recv` or `send` that no rank answers. Blames a rank that has returned, if any."""
    done = [other for other, state in states.items() if state.is_done]
    told = [f"{named(done)} returned"] if done else []
    waits = {other: wait if isinstance(wait, str) else in_words(wait) for other, wait in look.waits.items()}
    told += [f"rank {other} waits in {wait}" for other, wait in waits.items() if other != rank]
    return Difference((done or [rank])[0], f"{', '.join(told)} while rank {rank} waits in {call}", "")


def _is_hopeless(rank: int, wait: Collective | str, look: Look, states: Mapping[int, RankState]) -> bool:
    """Return True if this rank's wait cannot end, since no rank is left that could make the missing call."""
    if isinstance(wait, str):
        return True  # no message is in transit (`look_at`), and all other ranks wait or have returned
    members = _members(rank, wait.group, states)
    others = [member for member in members if member != rank]
    if any(other not in states or _members(other, wait.group, states) != members for other in others):
        return False
    absent = [other for other in others if _has_not_called(states[other], wait)]
    if absent and (NEEDS_ALL.match(wait.operation) or len(absent) == len(others)):
        return True
    return any(_cannot_meet(wait, look.waits.get(other)) for other in others)


def _members(rank: int, group: str, states: Mapping[int, RankState]) -> tuple[int, ...]:
    recalled = states[rank].recalled
    return tuple(recalled.members.get(group, ())) if recalled is not None else ()


def _has_not_called(state: RankState, wait: Collective) -> bool:
    """Return True if the rank has certainly not called the collective.

    A full flight record without this group's collectives proves nothing: other groups' calls may have displaced them.
    """
    collectives = state.recalled.collectives if state.recalled is not None else ()
    numbers = [each.number for each in collectives if each.group == wait.group]
    return max(numbers) < wait.number if numbers else len(collectives) < MAX_COLLECTIVES


def _cannot_meet(one: Collective, other: Collective | str | None) -> bool:
    if not isinstance(other, Collective) or (one.group, one.number) != (other.group, other.number):
        return False
    return essence(one, with_shapes=True) != essence(other, with_shapes=True)


class DeadlockWatch:
    """Looks for a deadlock in one attempt whenever all running ranks stand still."""

    def __init__(
        self, attempt: Attempt, clock: Callable[[], float], states: Callable[[], dict[int, RankState]]
    ) -> None:
        """Begin to watch an attempt.

        Args:
            attempt: The attempt, whose ranks have been started.
            clock: Returns the driver's time, in seconds.
            states: Returns each rank's state, from answers to the newest look.
        """
        self._attempt = attempt
        self._now = clock
        self._states = states
        self._numbers = itertools.count(1)
        self._asked: int | None = None
        """Number of the look that still lacks answers. None between looks."""
        self._before: Look | None = None
        self._num_vain = 0
        self._look_at = 0.0

    @property
    def due(self) -> float | None:
        """Time of the next look, in seconds on the driver's clock. None during a look, or while a rank runs."""
        return self._look_at if self._asked is None and self._all_stand() else None

    def forget(self) -> None:
        """Drop previous looks: `HangWatch` itself asks the ranks, or ranks may continue."""
        self._asked = self._before = None
        self._look_at = self._now() + LOOK_INTERVAL

    def is_proven(self) -> bool:
        """Ask the ranks for their stacks, or compare their answers with the previous look.

        Returns:
            True, with a report in the attempt, once two equal looks prove a deadlock.
        """
        attempt = self._attempt
        if not self._all_stand():
            self._asked, self._before, self._num_vain = None, None, 0
            return False
        if self._asked is None:
            if self._now() >= self._look_at:
                self._ask()
            return False
        if not self._have_answered(self._asked):
            return False
        self._asked = None
        states = self._states()
        before, self._before = self._before, look_at(states)
        self._num_vain = 0 if self._before is not None else self._num_vain + 1
        self._look_at = self._now() + min(LOOK_INTERVAL * max(1, self._num_vain), MAX_INTERVAL)
        if (difference := prove(before, self._before, states)) is None:
            return False
        attempt.hang, attempt.is_deadlock = report_deadlock(states, difference), True
        attempt.tell(messages.Tell(orders.ShowStacks()))
        return True

    def _all_stand(self) -> bool:
        attempt = self._attempt
        if not attempt.is_formed or attempt.world_size == 1 or attempt.prompts.debugged:
            return False
        num_ended = len(attempt.results) + len(attempt.failures) + len(attempt.exits)
        if attempt.has_delivered or len(attempt.standing) + num_ended < attempt.world_size:
            return False  # without a loop over all ranks for each event
        running = attempt.running
        return bool(running) and attempt.standing.issuperset(running)

    def _ask(self) -> None:
        attempt = self._attempt
        self._asked = next(self._numbers)
        attempt.located.clear()
        attempt.remembered.clear()
        attempt.tell(messages.Tell(orders.Locate(self._asked)))

    def _have_answered(self, number: int) -> bool:
        located, remembered = self._attempt.located, self._attempt.remembered
        return all(
            rank in remembered and rank in located and located[rank].look == number for rank in self._attempt.places
        )
