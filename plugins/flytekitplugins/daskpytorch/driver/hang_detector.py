"""Which ranks stand still, and which of them holds up the others. Pure; runs in the driver."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = ["RankState", "Stillness", "find_hung", "is_in_collective", "report_hang"]

COLLECTIVE_FILES = re.compile(r'File ".*torch/(distributed|autograd/graph\.py|nn/parallel/distributed\.py)')
"""Where a rank waits for its peers; during `backward` that is in the hooks of DistributedDataParallel."""
NUM_INNER_FRAMES = 2


class Stillness:
    """When each rank last gave a sign of life."""

    def __init__(self, ranks: Iterable[int], now: float) -> None:
        self._num_moves = dict.fromkeys(ranks, -1)
        self._moved_at = dict.fromkeys(self._num_moves, now)

    def note(self, rank: int, num_moves: int, now: float) -> None:
        """Take down a rank's count of signs of life."""
        if num_moves != self._num_moves[rank]:
            self._num_moves[rank], self._moved_at[rank] = num_moves, now

    def oldest(self, ranks: Iterable[int]) -> float | None:
        """When the stillest of these ranks last moved."""
        return min((self._moved_at[rank] for rank in ranks), default=None)

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


def report_hang(states: Mapping[int, RankState], hang_timeout: float) -> tuple[int, str]:
    """The rank that holds up the others, and the report: its first line says why, the rest what all were doing."""
    rank, why = find_hung(states)
    still = max((state.still_for for state in states.values() if not state.is_done), default=0.0)
    stacks = "".join(f"\n\nrank {other}:\n{state.stacks.rstrip()}" for other, state in states.items())
    told = f"no sign of life for {still:.1f} s (hang_timeout={hang_timeout:g}); {why}"
    return rank, f"it hangs, or holds up the others: {told}\nWhat all ranks were doing:{stacks}"


def find_hung(states: Mapping[int, RankState]) -> tuple[int, str]:
    """The rank that holds up the others, and why it is thought to.

    A rank that does not answer comes first: something keeps its process, or its interpreter, from running. Then the
    one that has entered the fewest collectives: the others wait for it in the next. Among equals one that is not
    inside a collective, and then the one that has stood still the longest.
    """
    silent = [rank for rank, state in states.items() if state.num_collectives is None]
    if silent:
        return silent[0], "it does not answer: suspended, or inside C code that holds the interpreter"
    entered = {rank: state.num_collectives or 0 for rank, state in states.items()}
    fewest = min(entered.values())
    behind = [rank for rank, count in entered.items() if count == fewest]
    if len(behind) < len(states):
        rank = behind[0]
        told = f"it has entered {fewest} collectives, other ranks {max(entered.values())}"
        return rank, f"{told}; its function has returned" if states[rank].is_done else told
    running = [rank for rank in behind if not states[rank].is_done]
    outside = [rank for rank in running if not is_in_collective(states[rank].stacks)]
    rank = max(outside or running or behind, key=lambda rank: states[rank].still_for)
    return rank, "it is not inside a collective" if outside else "all ranks are inside the same collective"


def is_in_collective(stacks: str) -> bool:
    """Whether the main thread, which faulthandler writes last, waits for other ranks."""
    main = stacks.rstrip().rpartition("(most recent call first):")[2].strip().splitlines()
    return any(COLLECTIVE_FILES.search(frame) for frame in main[:NUM_INNER_FRAMES])
