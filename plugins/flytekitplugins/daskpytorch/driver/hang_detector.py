"""Detection of silent ranks, of deadlocks, and of the rank that blocks other ranks. Pure functions, for the driver.

A deadlock is proven if all ranks wait in collectives that can never complete. A rank whose function has returned calls
no further collective. A rank whose main thread waits in one collective calls no other. If every rank is of either kind,
flight recorders show which collectives lack a rank for ever. Two equal looks, a few seconds apart, prove the deadlock.
If the state of any rank is unknown, `hang_timeout` decides instead.
"""

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from flytekitplugins.daskpytorch.driver.collectives import (
    Difference,
    compare,
    essence,
    in_words,
    named,
    users_frames,
)
from flytekitplugins.daskpytorch.protocol.failure import MAX_COLLECTIVES, NOT_THE_USERS, Collective, Recalled

COLLECTIVE_FILES = re.compile(r'File ".*torch/(distributed|autograd/graph\.py|nn/parallel/distributed\.py)')
"""Matches the stack frames of a rank that waits for other ranks. During `backward`, these frames are hooks of
DistributedDataParallel."""
NUM_INNER_FRAMES = 2
"""Number of innermost stack frames that are searched for a collective, to find whether a rank waits."""
NEEDS_ALL = re.compile(r"barrier|_?all_?reduce|_?all_?gather|_?reduce_?scatter")
"""Matches operations that complete only after every rank has called them."""
POINT_TO_POINT = re.compile(r'torch/distributed/distributed_c10d\.py", line \d+ in (recv|send)$')
PLACE = re.compile(r", line \d+ in ")

LEAST_TIMEOUT = 300.0
"""Minimum hang timeout with `hang_timeout="auto"`, in seconds."""
SLOWNESS = 10.0
"""Hang timeout with `hang_timeout="auto"`, as a multiple of the longest time between two signs of life of a rank.
`LEAST_TIMEOUT` is the lower bound."""
AUTO_INTERVAL = 30.0
"""Minimum number of seconds between two requests for all ranks' stacks, with `hang_timeout="auto"`."""
MAX_FRAMES = 10
"""Maximum number of stack frames per rank in the report of a hang. The rank's log contains all frames."""


class Stillness:
    """Times of the ranks' last signs of life, in seconds on the caller's clock."""

    slowest: float = 0.0
    """Longest time between two signs of life of one rank so far, in seconds."""

    def __init__(self, ranks: Iterable[int], now: float) -> None:
        self._num_moves = dict.fromkeys(ranks, -1)
        self.restart(now)

    def restart(self, now: float) -> None:
        """Count all ranks' silence from `now`, as the silence before has a known cause."""
        self._moved_at = dict.fromkeys(self._num_moves, now)

    def note(self, rank: int, num_moves: int, now: float) -> None:
        """Note a rank's number of signs of life."""
        if num_moves > self._num_moves[rank]:
            self.slowest = max(self.slowest, self.still_for(rank, now))
            self._num_moves[rank], self._moved_at[rank] = num_moves, now

    def hangs_at(self, ranks: Iterable[int], timeout: float | Literal["auto"], least: float = LEAST_TIMEOUT) -> float:
        """Return the time from which these ranks count as hung if all stay silent. Infinity without ranks.

        With a timeout in seconds, the rank with the longest silence decides. With `auto`, the rank with the shortest
        silence decides, and `least` is the minimum number of seconds.
        """
        moved_at = [self._moved_at[rank] for rank in ranks]
        if not moved_at:
            return math.inf
        if timeout == "auto":
            return max(moved_at) + max(least, SLOWNESS * self.slowest)
        return min(moved_at) + timeout

    def still_for(self, rank: int, now: float) -> float:
        """Return the seconds since a rank's last sign of life."""
        return now - self._moved_at[rank]


@dataclass(frozen=True, kw_only=True)
class RankState:
    """State of one rank when the gang hangs."""

    is_done: bool
    """True if the rank's function has returned."""
    num_collectives: int | None
    """Number of collectives that the rank has entered. None if the rank does not answer."""
    still_for: float
    """Seconds since the rank's last sign of life."""
    stacks: str
    """Tracebacks of the rank's threads, written by faulthandler. A short message if the rank sent no traceback."""
    num_moves: int | None = None
    """Number of the rank's signs of life so far. None if the rank does not answer."""
    num_bytes: int | None = None
    """Bytes that the rank has received over TCP. None while its sockets hold unread or unsent bytes, or if unknown."""
    recalled: Recalled | None = None
    """The rank's last collectives. None without an answer, or if torch records no collectives."""


def waits_of(states: Mapping[int, RankState]) -> Mapping[int, frozenset[tuple[str, int]]] | None:
    """Return the collectives, as group and number, in which each running rank waits.

    None if a rank may be working, or gave no answer.
    """
    running = {rank: state.recalled for rank, state in states.items() if not state.is_done}
    waits = {rank: _waits(recalled) for rank, recalled in running.items() if recalled is not None}
    return waits if len(waits) == len(running) and all(waits.values()) else None


def _waits(recalled: Recalled) -> frozenset[tuple[str, int]]:
    return frozenset((each.group, each.number) for each in recalled.collectives if not each.is_done)


def next_look(states: Mapping[int, RankState]) -> float:
    """Return the seconds until the next request for the ranks' stacks, with `hang_timeout="auto"`.

    The pause equals 10 % of the shortest silence, but at least `AUTO_INTERVAL`: long work needs few requests.
    """
    return max(AUTO_INTERVAL, 0.1 * min(state.still_for for state in states.values()))


def report_hang(states: Mapping[int, RankState], hang_timeout: float | Literal["auto"]) -> tuple[int, str]:
    """Return the rank that holds up the others, and a report: the reason in line 1, then the ranks' stacks."""
    difference = compare({rank: state.recalled for rank, state in states.items() if state.recalled is not None})
    rank, why = find_hung(states, difference)
    still = max((state.still_for for state in states.values() if not state.is_done), default=0.0)
    told = f"no sign of life for {still:.1f} s (hang_timeout={hang_timeout!r}); {why}"
    shown = f"{difference.shown}\n\n" if difference is not None else ""
    return rank, f"it hangs, or holds up the others: {told}\n{shown}{_doings(states)}"


def report_deadlock(states: Mapping[int, RankState], difference: Difference) -> tuple[int, str]:
    """Return the rank that causes a deadlock, and a report: the reason in line 1, then the ranks' stacks."""
    if states[difference.rank].is_done:
        ended = "; its function has returned, or has ended by exit code 0, and calls no collective any more"
    else:
        ended = ""
    shown = f"{difference.shown}\n\n" if difference.shown else ""
    return difference.rank, f"deadlock: {difference.what}{ended}; no rank can go on\n{shown}{_doings(states)}"


def explain_failure(
    recalled: Mapping[int, Recalled | None], failed: Collection[int], stacks: Mapping[int, str]
) -> str | None:
    """Return the difference between the ranks' collectives after a failed collective, or None. Line 1 is a sentence.

    Args:
        recalled: Each rank's last collectives. None if torch records no collectives.
        failed: Ranks whose collective has failed.
        stacks: Tracebacks of the other ranks.
    """
    difference = compare({rank: each for rank, each in recalled.items() if each is not None}, failed)
    if difference is None:
        return None
    told = f"{difference.what}\n{difference.shown}"
    frames = users_frames(main_frames(stacks.get(difference.rank, "")))
    return told + (f"\nrank {difference.rank} was in:{_indented(frames[:MAX_FRAMES])}" if frames else "")


def _indented(lines: Iterable[str]) -> str:
    return "".join(f"\n  {line}" for line in lines)


def _doings(states: Mapping[int, RankState]) -> str:
    """Return the stacks of the ranks' main threads. Ranks with equal stacks share one entry."""
    doing: dict[str, list[int]] = defaultdict(list)
    for rank, state in states.items():
        doing[_doing(state)].append(rank)
    shown = "".join(f"\n\n{named(ranks)}, {what}" for what, ranks in doing.items())
    return f"What the main threads were doing, the innermost call first (all threads are in the log):{shown}"


def _doing(state: RankState) -> str:
    frames = main_frames(state.stacks)
    if not frames:
        return state.stacks.strip() or "which showed no stacks"
    users = users_frames(frames)
    if state.is_done and not users:
        return "whose function has ended"
    title = "waiting for other ranks, called from" if _is_waiting(state.stacks) else "in"
    return f"{title}:{_indented((users or frames)[:MAX_FRAMES])}"


def find_hung(states: Mapping[int, RankState], difference: Difference | None = None) -> tuple[int, str]:
    """Return the rank that holds up the others, and the reason.

    The first rule that finds a rank decides:

    1. A rank without an answer. Its process is suspended, or C code holds its interpreter.
    2. The rank whose recorded collectives differ from the other ranks'.
    3. The rank with the fewest entered collectives. Other ranks wait for this rank in the next collective.
    4. A rank that waits for no other rank.
    5. The rank with the longest silence.
    """
    silent = [rank for rank, state in states.items() if state.num_collectives is None]
    if silent:
        return silent[0], "it does not answer: suspended, or inside C code that holds the interpreter"
    if difference is not None:
        has_returned = states[difference.rank].is_done
        return difference.rank, f"{difference.what}{'; its function has returned' if has_returned else ''}"
    entered = {rank: state.num_collectives or 0 for rank, state in states.items()}
    fewest = min(entered.values())
    behind = [rank for rank, count in entered.items() if count == fewest]
    if len(behind) < len(states):
        rank = behind[0]
        told = f"it has entered {fewest} collectives, other ranks {max(entered.values())}"
        return rank, f"{told}; its function has returned" if states[rank].is_done else told
    running = [rank for rank in states if not states[rank].is_done]
    outside = [rank for rank in running if not _is_waiting(states[rank].stacks)]
    rank = max(outside or running or states, key=lambda rank: states[rank].still_for)
    return rank, "it is not inside a collective" if outside else "all ranks wait for each other"


def _is_waiting(stacks: str) -> bool:
    """Return True if the main thread waits for other ranks, as in `all_reduce` or `backward`. False if it works."""
    return any(COLLECTIVE_FILES.search(frame) for frame in main_frames(stacks)[:NUM_INNER_FRAMES])


def main_frames(stacks: str) -> list[str]:
    """Return the main thread's frames, innermost first, from stacks that `faulthandler` has written.

    `faulthandler` writes the main thread last.
    """
    _, header, frames = stacks.rstrip().rpartition("(most recent call first):")
    return [line.strip() for line in frames.strip().splitlines()] if header else []


def other_frames(stacks: str) -> list[str]:
    """Return the frames of all threads but the main thread, from stacks that `faulthandler` has written."""
    others, _, _ = stacks.rstrip().rpartition("(most recent call first):")
    return [line.strip() for line in others.splitlines() if line.strip().startswith("File ")]


# ---- Proof of a deadlock


@dataclass(frozen=True)
class Look:
    """Snapshot of the collectives in which all running ranks wait."""

    waits: Mapping[int, Collective | str]
    """Rank -> collective in which the rank waits, or `"recv"` or `"send"`, which torch's flight recorder lacks."""
    counts: Mapping[int, object]
    """Rank -> the rank's counters and stacks, which change with its progress."""


def look_at(states: Mapping[int, RankState]) -> Look | None:
    """Return the collectives in which all running ranks wait. None: a rank may be working, or its state is unknown."""
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
    """Return True if a thread other than the main thread may call collectives, or the stacks are incomplete."""
    frames = other_frames(stacks)
    if not main_frames(stacks) or "..." in (frame.strip() for frame in stacks.splitlines()):
        return True
    return any(COLLECTIVE_FILES.search(frame) or not NOT_THE_USERS.match(frame) for frame in frames)


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
    """Return the reason for a proven deadlock, with the rank to blame. None: no proof of a deadlock.

    Args:
        before: The snapshot a few seconds earlier. None: no such snapshot, or a rank was working.
        look: The newest snapshot. None: a rank may be working.
        states: State of each rank at the newest snapshot.
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
