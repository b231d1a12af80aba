"""Detection of silent ranks, and of the rank that blocks other ranks. Pure functions, for the driver."""

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from flytekitplugins.daskpytorch.driver.collectives import Difference, compare, named, users_frames
from flytekitplugins.daskpytorch.protocol.failure import Recalled

COLLECTIVE_FILES = re.compile(r'File ".*torch/(distributed|autograd/graph\.py|nn/parallel/distributed\.py)')
"""Matches the stack frames of a rank that waits for other ranks. During `backward`, these frames are hooks of
DistributedDataParallel."""
NUM_INNER_FRAMES = 2
"""Number of innermost stack frames that are searched for a collective, to find whether a rank waits."""

LEAST_TIMEOUT = 300.0
"""Minimum hang timeout with `hang_timeout="auto"`, in seconds."""
SLOWNESS = 10.0
"""Hang timeout with `hang_timeout="auto"`, as a multiple of the longest time between two signs of life of a rank.
`LEAST_TIMEOUT` is the lower bound."""
AUTO_INTERVAL = 30.0
"""Minimum number of seconds between two requests for all ranks' stacks, with `hang_timeout="auto"`."""
ENDED = "whose function has ended"
MAX_FRAMES = 10
"""Maximum number of stack frames per rank in the report of a hang. The rank's log contains all frames."""


class Stillness:
    """Times of the ranks' last signs of life, in seconds on the caller's clock."""

    slowest: float = 0.0
    """Longest time between two signs of life of one rank so far, in seconds."""

    def __init__(self, ranks: Iterable[int], now: float) -> None:
        self._num_moves = dict.fromkeys(ranks, -1)
        self._moved_at = dict.fromkeys(self._num_moves, now)
        self._excused_at = now

    def excuse(self, until: float | None) -> None:
        """Count all ranks' silence from `until` at the earliest, as the silence before has a known cause."""
        if until is not None and until > self._excused_at:
            self._excused_at = until
            self._moved_at = {rank: max(at, until) for rank, at in self._moved_at.items()}

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
        return ENDED if state.is_done else state.stacks.strip() or "which showed no stacks"
    users = users_frames(frames)
    if state.is_done and not users:
        return ENDED
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
    silent = [rank for rank, state in states.items() if state.num_collectives is None and not state.is_done]
    if silent:
        return silent[0], "it does not answer: suspended, or inside C code that holds the interpreter"
    if difference is not None:
        has_returned = states[difference.rank].is_done
        return difference.rank, f"{difference.what}{'; its function has returned' if has_returned else ''}"
    entered = {rank: state.num_collectives for rank, state in states.items() if state.num_collectives is not None}
    fewest = min(entered.values(), default=0)
    behind = [rank for rank, count in entered.items() if count == fewest]
    if len(behind) < len(entered):
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
