"""CPU, memory, GPU and pace of the ranks for the Deck, with a bounded number of points."""

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from flytekitplugins.daskpytorch.display.training import Pace
from flytekitplugins.daskpytorch.goodput import RankUsage
from flytekitplugins.daskpytorch.report import Curve

MAX_LINES = 4
"""Maximum number of ranks with a line each. Larger gangs have lines for the lowest, the middle and the highest
value."""
MAX_POINTS = 400
"""Maximum number of points of a line."""
GIB = float(1 << 30)
STEPS = "optimizer steps per second"
"""Name of the chart of optimizer steps. Logged steps have the user's own numbers, and another chart."""

Points = list[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class RankSpeed:
    """Newest sample of a rank, with the pace from this and earlier samples."""

    usage: RankUsage
    steps_per_second: float | None
    """Optimizer steps per second of the rank, without the time before the first batch or step. None: unknown."""


QUANTITIES: Mapping[str, tuple[str, Callable[[RankUsage], float | None]]] = {
    "CPU (cores)": ("cpu_cores", lambda usage: usage.cpu),
    "memory (GiB)": ("memory_gib", lambda usage: usage.memory / GIB),
    "GPU memory (GiB)": ("gpu_memory_gib", lambda usage: _times(usage.gpu_memory, 1 / GIB)),
    "GPU utilization (%)": ("gpu_percent", lambda usage: _times(usage.gpu_utilization, 100)),
}
"""Quantities of a sample for the Deck and for trackers: title in the Deck -> metric of trackers, and function that
returns the value."""


@dataclass
class Usages:
    """Newest samples of all ranks, and curves over time."""

    began_at: float
    num_ranks: int = 0
    """Number of ranks in the gang."""
    newest: dict[int, RankSpeed] = field(default_factory=dict)
    _paces: dict[int, Pace] = field(default_factory=dict)
    _first: int = sys.maxsize
    """Lowest rank with a sample. In large gangs, each sample of this rank adds a point to the curves."""
    _lines: dict[str, dict[str, Curve]] = field(default_factory=dict)

    def take(self, usage: RankUsage) -> None:
        """Store a sample, and add its values to the curves."""
        pace = self._paces.setdefault(usage.rank, Pace())
        pace.add(usage.time - usage.seconds.get("preparing", 0.0), usage.num_steps)
        self._first = min(usage.rank, self._first)
        self.newest[usage.rank] = RankSpeed(usage=usage, steps_per_second=pace.per_second)
        if max(self.num_ranks, len(self.newest)) <= MAX_LINES:
            self._draw(usage.time, f"rank {usage.rank}", self.newest[usage.rank])
        elif usage.rank == self._first:
            self._draw_spread(usage.time)

    def expect(self, num_ranks: int) -> None:
        """Prepare for a new attempt with this number of ranks. The curves stay."""
        self.num_ranks = num_ranks
        self.newest.clear()
        self._paces.clear()
        self._first = sys.maxsize

    def charts(self) -> Iterable[tuple[str, dict[str, Points]]]:
        """Yield each quantity with its curves over the seconds since the start."""
        for what, lines in self._lines.items():
            yield what, {name: line.points for name, line in sorted(lines.items(), key=_order)}

    def _draw(self, time: float, name: str, speed: RankSpeed) -> None:
        for what, value in _drawn(speed).items():
            self._add(what, name, time, value)

    def _draw_spread(self, time: float) -> None:
        drawn = [_drawn(speed) for speed in self.newest.values()]
        for what in (STEPS, *QUANTITIES):
            if values := sorted(value for each in drawn if (value := each[what]) is not None):
                for name, value in (
                    ("lowest", values[0]),
                    ("middle", values[len(values) // 2]),
                    ("highest", values[-1]),
                ):
                    self._add(what, f"{name} rank", time, value)

    def _add(self, what: str, name: str, time: float, value: float | None) -> None:
        if value is not None:
            lines = self._lines.setdefault(what, {})
            lines.setdefault(name, Curve(MAX_POINTS)).add((0, max(0.0, time - self.began_at), value))


def metrics_of(usage: RankUsage) -> dict[str, float]:
    """Return a sample's known values, by their metric of trackers."""
    return {name: value for name, of in QUANTITIES.values() if (value := of(usage)) is not None}


def _drawn(speed: RankSpeed) -> dict[str, float | None]:
    return {STEPS: speed.steps_per_second} | {title: of(speed.usage) for title, (_, of) in QUANTITIES.items()}


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _order(line: tuple[str, Curve]) -> int:
    number = line[0].rpartition(" ")[2]
    return int(number) if number.isdigit() else -1
