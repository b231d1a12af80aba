"""Detection of silent ranks and of the rank that blocks other ranks. Pure functions. Runs in the driver."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from flytekitplugins.daskpytorch.driver.collectives import NOT_THE_USERS, Difference, compare, named, users_frames
from flytekitplugins.daskpytorch.protocol.failure import Recalled

COLLECTIVE_FILES = re.compile(r'File ".*torch/(distributed|autograd/graph\.py|nn/parallel/distributed\.py)')
"""Frames of ranks waiting for peers. During `backward`, these frames are hooks of DistributedDataParallel."""
NUM_INNER_FRAMES = 2
"""Number of innermost frames in which `collective_of` looks for a frame of a collective."""
FRAME = re.compile(r"File \"(?P<file>.*)\", line \d+ in (?P<function>.*)")
LEAST_TIMEOUT = 300.0
"""Minimum hang timeout with `auto`, in seconds."""
SLOWNESS = 10.0
"""Hang timeout with `auto`, as a multiple of `Stillness.slowest`. `LEAST_TIMEOUT` is the lower bound."""
AUTO_PULSE = 10.0
"""Seconds between a rank's reports with `auto`. Far shorter than `LEAST_TIMEOUT`, but too long to slow down training
steps."""
LOOK_INTERVAL = 30.0
"""Minimum number of seconds between two requests for all ranks' stacks with `auto`. See `next_look`."""
MAX_FRAMES = 10
"""Maximum number of frames per rank in the report. The log contains all frames."""


def pulse_for(hang_timeout: float | Literal["auto"] | None) -> float | None:
    """Return the interval, in seconds, between reports of a rank's signs of life. None without a hang timeout."""
    if hang_timeout is None:
        return None
    return AUTO_PULSE if hang_timeout == "auto" else min(1.0, hang_timeout / 5)


class Stillness:
    """Times of the ranks' last signs of life, in seconds on the caller's clock."""

    slowest: float = 0.0
    """Longest time between two signs of life of a rank, in seconds."""

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

    def hangs_at(self, ranks: Iterable[int], timeout: float | Literal["auto"]) -> float:
        """Return the time from which these ranks count as hung if all stay silent. Infinity without ranks.

        With a timeout in seconds, the rank with the longest silence decides. With `auto`, the shortest silence decides.
        """
        moved_at = [self._moved_at[rank] for rank in ranks]
        if not moved_at:
            return math.inf
        if timeout == "auto":
            return max(moved_at) + max(LEAST_TIMEOUT, SLOWNESS * self.slowest)
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
    """Bytes received by the rank over TCP, as in `Located`. None if unknown."""
    recalled: Recalled | None = None
    """The rank's last collectives. None without an answer, or if torch records no collectives."""


def waits_of(states: Mapping[int, RankState]) -> Mapping[int, frozenset[tuple[str, int]]] | None:
    """Return the collectives, as group and number, in which each running rank waits.

    None if a rank may be working, or gave no answer. If all ranks wait, no rank can complete a collective.
    """
    running = {rank: state.recalled for rank, state in states.items() if not state.is_done}
    waits = {rank: _waits(recalled) for rank, recalled in running.items() if recalled is not None}
    return waits if len(waits) == len(running) and all(waits.values()) else None


def _waits(recalled: Recalled) -> frozenset[tuple[str, int]]:
    return frozenset((each.group, each.number) for each in recalled.collectives if not each.is_done)


def next_look(states: Mapping[int, RankState]) -> float:
    """Return the seconds until `auto` asks for the ranks' stacks again.

    The pause equals 10 % of the shortest silence, but at least `LOOK_INTERVAL`: long work needs few requests.
    """
    return max(LOOK_INTERVAL, 0.1 * min(state.still_for for state in states.values()))


def report_hang(states: Mapping[int, RankState], hang_timeout: float | Literal["auto"]) -> tuple[int, str]:
    """Return the blocking rank and a report. Line 1 gives the reason, further lines show the ranks' stacks."""
    difference = compare({rank: state.recalled for rank, state in states.items() if state.recalled is not None})
    rank, why = find_hung(states, difference)
    still = max((state.still_for for state in states.values() if not state.is_done), default=0.0)
    told = f"no sign of life for {still:.1f} s (hang_timeout={hang_timeout!r}); {why}"
    shown = f"{difference.shown}\n\n" if difference is not None else ""
    return rank, f"it hangs, or holds up the others: {told}\n{shown}{_doings(states)}"


def report_deadlock(states: Mapping[int, RankState], difference: Difference) -> tuple[int, str]:
    """Return the rank that causes a deadlock, and the report."""
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
    collective = collective_of(state.stacks)
    title = f"in {collective}, called from" if collective else "in"
    return f"{title}:{_indented((users or frames)[:MAX_FRAMES])}"


def find_hung(states: Mapping[int, RankState], difference: Difference | None = None) -> tuple[int, str]:
    """Return the blocking rank and the reason.

    The first rule that finds a rank decides:

    1. A rank without an answer. Its process is suspended, or C code holds its interpreter.
    2. The rank whose recorded collectives differ from the other ranks'.
    3. The rank with the fewest entered collectives. Other ranks wait for this rank in the next collective.
    4. A rank outside all collectives.
    5. A rank whose collective differs from most ranks' collective.
    6. The rank with the longest silence.
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
    running = [rank for rank in behind if not states[rank].is_done]
    within = {rank: collective_of(states[rank].stacks) for rank in running}
    outside = [rank for rank in running if within[rank] is None]
    most = Counter(within.values()).most_common(1)
    apart = [rank for rank in running if within[rank] != most[0][0]]
    rank = max(outside or apart or running or behind, key=lambda rank: states[rank].still_for)
    if outside:
        return rank, "it is not inside a collective"
    if not apart:
        return rank, "all ranks are inside the same collective"
    return rank, f"the ranks are inside different collectives: {_in_words(within)}"


def _in_words(within: Mapping[int, str | None]) -> str:
    ranks_in: dict[str | None, list[int]] = defaultdict(list)
    for rank, collective in within.items():
        ranks_in[collective].append(rank)
    return ", ".join(f"{named(ranks)} in {collective}" for collective, ranks in ranks_in.items())


def collective_of(stacks: str) -> str | None:
    """Return the function in which the main thread waits for other ranks. None if the main thread works.

    User code has called the function. Examples: `all_reduce`, `backward`, `DistributedDataParallel.forward`.
    """
    frames = main_frames(stacks)
    if not any(COLLECTIVE_FILES.search(frame) for frame in frames[:NUM_INNER_FRAMES]):
        return None
    outermost = list(takewhile(NOT_THE_USERS.search, frames))
    return next(_names(reversed(outermost)), None)


def _names(frames: Iterable[str]) -> Iterator[str]:
    for frame in frames:
        if COLLECTIVE_FILES.search(frame) and (parts := FRAME.search(frame)) and "c10d_logger" not in parts["file"]:
            if "nn/parallel" in parts["file"]:
                yield f"DistributedDataParallel.{parts['function']}"
            else:
                yield "backward" if "autograd" in parts["file"] else parts["function"]


def main_frames(stacks: str) -> list[str]:
    """Return the frames of the main thread, the innermost first. faulthandler writes the main thread last."""
    _, header, frames = stacks.rstrip().rpartition("(most recent call first):")
    return [line.strip() for line in frames.strip().splitlines()] if header else []


def other_frames(stacks: str) -> list[str]:
    """Return the frames of all threads but the main thread."""
    others, _, _ = stacks.rstrip().rpartition("(most recent call first):")
    return [line.strip() for line in others.splitlines() if line.strip().startswith("File ")]
