"""Which ranks stand still, and which of them holds up the others. Pure; runs in the driver."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from flytekitplugins.daskpytorch.driver.collectives import NOT_THE_USERS, Difference, compare, named, users_frames
from flytekitplugins.daskpytorch.protocol.collectives import Recalled

COLLECTIVE_FILES = re.compile(r'File ".*torch/(distributed|autograd/graph\.py|nn/parallel/distributed\.py)')
"""Where a rank waits for its peers; during `backward` that is in the hooks of DistributedDataParallel."""
NUM_INNER_FRAMES = 2
FRAME = re.compile(r"File \"(?P<file>.*)\", line \d+ in (?P<function>.*)")
LEAST_TIMEOUT = 300.0
"""Seconds of silence in which nobody counts as hung by `auto`, and ..."""
SLOWNESS = 10.0
"""... so many times the slowest that was seen."""
AUTO_PULSE = 10.0
"""Seconds: little beside these 300, and nothing that a step notices."""
LOOK_INTERVAL = 30.0
"""Seconds from one look at where all ranks are to the next, by `auto`; once they have stood still for long, more."""
MAX_FRAMES = 10
"""Of each rank in the report; the log has all."""


def pulse_for(hang_timeout: float | Literal["auto"] | None) -> float | None:
    """Seconds between two reports of a rank's signs of life; None: nobody asks."""
    if hang_timeout is None:
        return None
    return AUTO_PULSE if hang_timeout == "auto" else min(1.0, hang_timeout / 5)


class Stillness:
    """When each rank last gave a sign of life."""

    slowest: float = 0.0
    """The longest that a rank has taken from one sign of life to the next."""

    def __init__(self, ranks: Iterable[int], now: float) -> None:
        self._num_moves = dict.fromkeys(ranks, -1)
        self.restart(now)

    def restart(self, now: float) -> None:
        """Count silence from here: what was before is explained."""
        self._moved_at = dict.fromkeys(self._num_moves, now)

    def note(self, rank: int, num_moves: int, now: float) -> None:
        """Take down a rank's count of signs of life."""
        if num_moves > self._num_moves[rank]:
            self.slowest = max(self.slowest, self.still_for(rank, now))
            self._num_moves[rank], self._moved_at[rank] = num_moves, now

    def hangs_at(self, ranks: Iterable[int], timeout: float | Literal["auto"]) -> float:
        """When these ranks will have stood still for too long: the stillest of them, or by `auto` all of them."""
        moved_at = [self._moved_at[rank] for rank in ranks]
        if not moved_at:
            return math.inf
        if timeout == "auto":
            return max(moved_at) + max(LEAST_TIMEOUT, SLOWNESS * self.slowest)
        return min(moved_at) + timeout

    def still_for(self, rank: int, now: float) -> float:
        """Seconds since a rank moved."""
        return now - self._moved_at[rank]


@dataclass(frozen=True, kw_only=True)
class RankState:
    """What is known of one rank when the gang hangs."""

    is_done: bool
    """Its function has returned."""
    num_collectives: int | None
    """How many collectives it has entered; None where it does not even say."""
    still_for: float
    """Seconds without a sign of life."""
    stacks: str
    """The tracebacks of its threads."""
    num_moves: int | None = None
    """How many signs of life it has given."""
    num_bytes: int | None = None
    """As of `Located`."""
    recalled: Recalled | None = None
    """Its last collectives, where torch records them."""


def waits_of(states: Mapping[int, RankState]) -> Mapping[int, frozenset[tuple[str, int]]] | None:
    """The collectives, by group and number, that each rank waits in; None where a rank may be at work, or has not said.

    Ranks that are all waiting have nobody to wait for.
    """
    running = {rank: state.recalled for rank, state in states.items() if not state.is_done}
    waits = {rank: _waits(recalled) for rank, recalled in running.items() if recalled is not None}
    return waits if len(waits) == len(running) and all(waits.values()) else None


def _waits(recalled: Recalled) -> frozenset[tuple[str, int]]:
    return frozenset((each.group, each.number) for each in recalled.collectives if not each.is_done)


def next_look(states: Mapping[int, RankState]) -> float:
    """Seconds until `auto` looks again: of ranks that work for an hour nobody needs twice a minute to know."""
    return max(LOOK_INTERVAL, 0.1 * min(state.still_for for state in states.values()))


def report_hang(states: Mapping[int, RankState], hang_timeout: float | Literal["auto"]) -> tuple[int, str]:
    """The rank that holds up the others, and the report: its first line says why, the rest what all were doing."""
    difference = compare({rank: state.recalled for rank, state in states.items() if state.recalled is not None})
    rank, why = find_hung(states, difference)
    still = max((state.still_for for state in states.values() if not state.is_done), default=0.0)
    told = f"no sign of life for {still:.1f} s (hang_timeout={hang_timeout!r}); {why}"
    shown = f"{difference.shown}\n\n" if difference is not None else ""
    return rank, f"it hangs, or holds up the others: {told}\n{shown}{_doings(states)}"


def report_deadlock(states: Mapping[int, RankState], difference: Difference) -> tuple[int, str]:
    """The rank to blame for ranks that wait for ever, and the report."""
    if states[difference.rank].is_done:
        ended = "; its function has returned, or has ended by exit code 0, and calls no collective any more"
    else:
        ended = ""
    shown = f"{difference.shown}\n\n" if difference.shown else ""
    return difference.rank, f"deadlock: {difference.what}{ended}; no rank can go on\n{shown}{_doings(states)}"


def explain_failure(
    recalled: Mapping[int, Recalled | None], failed: Collection[int], stacks: Mapping[int, str]
) -> str | None:
    """What differs in the ranks' collectives after the failure of one; the first line is a sentence. None: nothing.

    Args:
        recalled: What each rank has said that it remembers.
        failed: Ranks whose collective has failed.
        stacks: What the others were doing.
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
    """What the ranks' main threads were doing, those together that were doing the same."""
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
    """The rank that holds up the others, and why it is thought to.

    A rank that does not answer comes first: something keeps its process, or its interpreter, from running. Then what
    differs in the ranks' collectives, where they remember those. Then the one that has entered the fewest: the others
    wait for it in the next. Among equals one that is not inside a collective, then one that is in another collective
    than most, and then the one that has stood still the longest.
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
    """What the main thread waits for other ranks in: the function that the user's code has called; None: it does not.

    For example `all_reduce`, `backward` or `DistributedDataParallel.forward`.
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
    """The frames of the main thread, which faulthandler writes last; the innermost comes first."""
    _, header, frames = stacks.rstrip().rpartition("(most recent call first):")
    return [line.strip() for line in frames.strip().splitlines()] if header else []


def other_frames(stacks: str) -> list[str]:
    """The frames of all threads but the main one."""
    others, _, _ = stacks.rstrip().rpartition("(most recent call first):")
    return [line.strip() for line in others.splitlines() if line.strip().startswith("File ")]
