"""Figures of a benchmark: the rows of the table in `README.md`, and the machine of the measurement.

A benchmark makes a `Figure` of each number that counts, and passes all figures to `report`, which prints the table.
`all.py` also writes the figures to a file. A number that misses its goal is bold.

This module imports only the standard library.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

FILE = "BENCHMARK_FIGURES"
"""Environment variable with the file to which `report` appends figures, one line of JSON each."""
MISSING = "–"
"""In the place of the version of a package that is not installed."""
HEAD = ("| what | here | peer | ratio | goal |", "|---|---|---|---|---|")
PACKAGES = (
    "flytekitplugins-daskpytorch",
    "torch",
    "distributed",
    "flytekit",
    "flyte",
    "ray",
    "torchmonarch",
    "torchrunx",
)


@dataclass(frozen=True, kw_only=True)
class Goal:
    """Goal of a figure: a bound on a number or on a ratio."""

    bound: float
    of: str = "ratio"
    """Bounded value. `ratio`: the ratio to the peer. `here`: the number measured here."""
    at_most: bool = False

    def is_met(self, found: float) -> bool:
        """Return True if the number keeps the bound."""
        return found <= self.bound if self.at_most else found >= self.bound


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Numbers of a row, one for each round, with the peer's numbers and the goals."""

    what: str
    """Name of the row. A later measurement replaces the row of the same name."""
    here: Sequence[float]
    unit: str = "s"
    peer: str = ""
    theirs: Sequence[float] = ()
    ratios: Sequence[float] = ()
    """Ratio of each round, whose meaning is in `ratio_of`."""
    ratio_of: str = "as fast"
    goals: Sequence[Goal] = ()

    @classmethod
    def beside(cls, peer: str, theirs: Sequence[float], *, share: bool = False, **others: Any) -> Figure:
        """Return a figure with a peer's numbers.

        Args:
            peer: Name of the peer.
            theirs: Numbers of the peer, one for each round.
            share: True: the ratio is our number divided by the peer's. False: the ratio says how many times as fast
                ours is. Fewer seconds are faster, and so are more of all other units.
            others: The other fields.
        """
        is_time = others.get("unit", "s") in ("s", "ms", "µs")
        pairs = list(zip(others["here"], theirs, strict=True))
        ratios = [mine / its if share or not is_time else its / mine for mine, its in pairs]
        return cls(peer=peer, theirs=list(theirs), ratios=ratios, ratio_of="of its" if share else "as fast", **others)

    @classmethod
    def beside_quickest(cls, peers: Mapping[str, Sequence[float]], **others: Any) -> Figure:
        """Return a figure in seconds beside the quickest of several peers in each round. The row names all peers."""
        best = [min(each) for each in zip(*peers.values(), strict=True)]
        names = ", ".join(f"{name} {spread(theirs, 's')}" for name, theirs in peers.items())
        return cls.beside(f"{names}; the quickest" if len(peers) > 1 else next(iter(peers)), best, **others)

    def misses(self, of: str) -> bool:
        """Return True if the median misses a goal for `ratio` or `here`."""
        values = self.ratios if of == "ratio" else self.here
        return any(goal.of == of and not goal.is_met(statistics.median(values)) for goal in self.goals)

    def cells(self) -> list[str]:
        """Return the cells of the row: what, here, peer, ratio, goal."""
        here, ratio = (f"**{self.measured(of)}**" if self.misses(of) else self.measured(of) for of in ("here", "ratio"))
        its = f"{self.peer} {spread(self.theirs, self.unit)}" if self.theirs else self.peer
        return [self.what, here, its or "-", ratio, "; ".join(map(self.wanted, self.goals)) or "-"]

    def measured(self, of: str) -> str:
        """Return the median and the spread of `here` or of the ratio."""
        if of == "here":
            return spread(self.here, self.unit)
        return f"{spread(self.ratios, 'x')} {self.ratio_of}" if self.ratios else "-"

    def wanted(self, goal: Goal) -> str:
        """Return a goal in a few words."""
        unit = "x" if goal.of == "ratio" else self.unit
        return f"at {'most' if goal.at_most else 'least'} {number(goal.bound)} {unit}".strip()


def at_most(bound: float, of: str = "ratio") -> list[Goal]:
    """Return the goal of a number that should be small."""
    return [Goal(bound=bound, of=of, at_most=True)]


def at_least(bound: float, of: str = "ratio") -> list[Goal]:
    """Return the goal of a number that should be large."""
    return [Goal(bound=bound, of=of)]


def spread(values: Sequence[float], unit: str) -> str:
    """Return the median of several rounds, with the least and the greatest value in brackets."""
    median = f"{number(statistics.median(values))} {unit}".strip()
    return f"{median} ({number(min(values))}-{number(max(values))})" if len(values) > 1 else median


def number(value: float) -> str:
    """Return the number with three significant digits, and with all digits before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{float(f'{value:.3g}'):g}"


def report(figures: Iterable[Figure], on: str) -> None:
    """Print the machine and the table, and append the figures to the file that `all.py` names."""
    found = list(figures)
    if file := os.environ.get(FILE):
        with Path(file).open("a") as lines:
            lines.writelines(f"{json.dumps(asdict(figure))}\n" for figure in found)
    print("", on, "", *HEAD, *rows(found), sep="\n", flush=True)


def rows(figures: Iterable[Figure]) -> Iterator[str]:
    """Return the lines of a table, without its head."""
    return (f"| {' | '.join(figure.cells())} |" for figure in figures)


def machine() -> str:
    """Return the day, the machine, its load and the versions."""
    versions = ", ".join(f"{name} {version_of(name)}" for name in PACKAGES)
    return (
        f"{time.strftime('%Y-%m-%d')}; {len(os.sched_getaffinity(0))} cores, {cpu_model()}, {gpu_models()}, "
        f"load {os.getloadavg()[0]:.1f} before the start; Python {platform.python_version()}, {versions}"
    )


def version_of(package: str) -> str:
    """Return a package's version, or `MISSING`."""
    try:
        return version(package)
    except PackageNotFoundError:
        return MISSING


def cpu_model() -> str:
    """Return the processor's name as Linux reports it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


@functools.cache
def gpus() -> list[str]:
    """Return the models of the GPUs that torch finds in a separate process."""
    if not Path("/dev/nvidiactl").exists():
        return []
    question = """if True:
        import json, torch
        print(json.dumps([torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]))
    """
    return list(json.loads(subprocess.run([sys.executable, "-c", question], stdout=subprocess.PIPE, check=True).stdout))


def gpu_models() -> str:
    """Return the number of GPUs of each model, in words."""
    counts = Counter(gpus())
    return ", ".join(f"{count} x {model}" for model, count in counts.items()) or "no GPU"
