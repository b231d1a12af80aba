"""CPU, memory, GPU and pace of the ranks for the Deck, with a bounded number of points."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from flytekitplugins.daskpytorch.display.training import Pace
from flytekitplugins.daskpytorch.goodput import RankUsage
from flytekitplugins.daskpytorch.report import Curve

MAX_RANKS = 8
"""Maximum number of ranks whose usage is drawn and recorded. Larger gangs have the first ranks drawn."""
MAX_POINTS = 400
"""Maximum number of points of a line."""
GIB = float(1 << 30)
STEPS = "optimizer steps per second"
"""Name of the chart of optimizer steps. Logged steps have the user's own numbers, and another chart."""
LABELS = {
    "cpu_cores": "CPU (cores)",
    "memory_gib": "memory (GiB)",
    "gpu_memory_gib": "GPU memory (GiB)",
    "gpu_percent": "GPU utilization (%)",
}
"""Names of charts and columns, by the names of `amounts`."""

Points = list[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class RankSpeed:
    """Newest sample of a rank, with the pace from this and earlier samples."""

    usage: RankUsage
    steps_per_second: float | None
    """Optimizer steps per second of the rank, without the time before the first batch or step. None: unknown."""


def amounts(usage: RankUsage) -> dict[str, float]:
    """Return what a rank uses of its machine, by the names in `LABELS`. Without a GPU, the GPU's amounts are absent."""
    found = {"cpu_cores": usage.cpu, "memory_gib": usage.memory / GIB}
    if usage.gpu_memory is not None:
        found["gpu_memory_gib"] = usage.gpu_memory / GIB
    if usage.gpu_utilization is not None:
        found["gpu_percent"] = 100 * usage.gpu_utilization
    return found


@dataclass
class Usages:
    """Newest samples of all ranks, and curves over time of the first ranks."""

    began_at: float
    newest: dict[int, RankSpeed] = field(default_factory=dict)
    _paces: dict[int, Pace] = field(default_factory=dict)
    _lines: dict[str, dict[str, Curve]] = field(default_factory=dict)
    """Curves of each quantity, by line."""

    def take(self, usage: RankUsage) -> None:
        """Store a sample, and add its values to the curves."""
        pace = self._paces.setdefault(usage.rank, Pace())
        pace.add(usage.time - usage.seconds.get("preparing", 0.0), usage.num_steps)
        self.newest[usage.rank] = RankSpeed(usage=usage, steps_per_second=pace.per_second)
        if usage.rank < MAX_RANKS:
            values = {LABELS[name]: value for name, value in amounts(usage).items()}
            if pace.per_second is not None:
                values[STEPS] = pace.per_second
            for what, value in values.items():
                curve = self._lines.setdefault(what, {}).setdefault(f"rank {usage.rank}", Curve(MAX_POINTS))
                curve.add((0, max(0.0, usage.time - self.began_at), value))

    def forget(self) -> None:
        """Prepare for a new attempt. The curves stay."""
        self.newest.clear()
        self._paces.clear()

    def charts(self) -> Iterable[tuple[str, dict[str, Points]]]:
        """Yield each quantity with its curves over the seconds since the start, the steps first."""
        for what in (STEPS, *LABELS.values()):
            if lines := self._lines.get(what):
                yield what, {name: lines[name].points for name in sorted(lines)}
