"""What a benchmark has found: one row of the table in `README.md`, and what it says of its goals.

A benchmark makes a `Figure` of each number that counts and passes all of them to `reported`, whose lines it prints.
Where `all.py` runs it, they are also written down for the table.

This module imports nothing but the standard library.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FILE = "BENCHMARK_FIGURES"
"""An environment variable that names the file to which figures go, a line of JSON each."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What was to be reached."""

    bound: float
    of: str = "ratio"
    """Of the `ratio`, or of what was measured `here`."""
    at_most: bool = False

    def is_met(self, found: float) -> bool:
        """Whether the number is at least, or at most, the bound."""
        return found <= self.bound if self.at_most else found >= self.bound


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A number by round, the peer's beside it, and the goals that it has."""

    what: str
    """By which its row is found again."""
    here: Sequence[float]
    unit: str = "s"
    peer: str = ""
    theirs: Sequence[float] = ()
    ratios: Sequence[float] = ()
    """One by round, in whichever direction `ratio_of` says."""
    ratio_of: str = "as fast"
    """What the ratio counts; `of its time`, or `as fast`, or the like."""
    goals: Sequence[Goal] = ()

    @classmethod
    def beside(cls, peer: str, theirs: Sequence[float], *, share: bool = False, **others: Any) -> Figure:
        """One with a peer's. The ratio says how many times as fast it is; `share`: what share of the peer's it takes.

        What takes seconds (`unit="s"`, `"ms"`) is faster the less of them it takes, all else the more there is of it.
        """
        here = others["here"]
        is_time = others.get("unit", "s") in ("s", "ms", "µs")
        pairs = list(zip(here, theirs, strict=True))
        ratios = [mine / its if share or not is_time else its / mine for mine, its in pairs]
        label = "of its" if share else "as fast"
        return cls(peer=peer, theirs=list(theirs), ratios=ratios, ratio_of=label, **others)

    def found(self, of: str) -> float:
        """The median of what a goal is about."""
        return statistics.median(self.ratios if of == "ratio" else self.here)

    def misses(self, of: str) -> bool:
        """Whether a goal that is about this was not reached."""
        return any(goal.of == of and not goal.is_met(self.found(of)) for goal in self.goals)

    def lines(self) -> Iterator[str]:
        """What came of each goal, in a line."""
        for goal in self.goals:
            outcome = "reached" if goal.is_met(self.found(goal.of)) else "missed"
            beside = f" beside {self.peer}" if goal.of == "ratio" and self.peer else ""
            yield f"- {self.what}{beside}: {outcome}, {self.measured(goal.of)}; goal {self.wanted(goal)}"

    def cells(self) -> list[str]:
        """The row: what, here, peer, ratio, goal."""
        here, ratio = (f"**{self.measured(of)}**" if self.misses(of) else self.measured(of) for of in ("here", "ratio"))
        its = f"{self.peer} {spread(self.theirs, self.unit)}" if self.theirs else self.peer
        return [self.what, here, its or "-", ratio, "; ".join(map(self.wanted, self.goals)) or "-"]

    def measured(self, of: str) -> str:
        """The median and the spread of what a goal may be about."""
        if of == "here":
            return spread(self.here, self.unit)
        return f"{spread(self.ratios, 'x')} {self.ratio_of}" if self.ratios else "-"

    def wanted(self, goal: Goal) -> str:
        """A goal in a few words."""
        unit = "x" if goal.of == "ratio" else self.unit
        return f"at {'most' if goal.at_most else 'least'} {number(goal.bound)} {unit}"


def spread(values: Sequence[float], unit: str) -> str:
    """The median; in brackets the least and the greatest, where there are several rounds."""
    median = f"{number(statistics.median(values))} {unit}"
    return f"{median} ({number(min(values))}-{number(max(values))})" if len(values) > 1 else median


def number(value: float) -> str:
    """Three digits that count, and all before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{float(f'{value:.3g}'):g}"


def reported(figures: Iterable[Figure]) -> Iterator[str]:
    """The lines that say what came of the goals; the figures go to the file that `all.py` has named."""
    found = list(figures)
    if file := os.environ.get(FILE):
        with Path(file).open("a") as lines:
            lines.writelines(f"{json.dumps(asdict(figure))}\n" for figure in found)
    for figure in found:
        yield from figure.lines()
