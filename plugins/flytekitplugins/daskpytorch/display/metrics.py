"""Metrics of a training for the Deck, by step, with a bounded number of points."""

import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from flytekitplugins.daskpytorch.checks import direction_of
from flytekitplugins.daskpytorch.report import Curve
from flytekitplugins.daskpytorch.report.chart import MAX_VALUE, Point, Points

HELD_OUT = re.compile(
    r"^(held_?out|val|valid|validation|eval|evaluation|test|dev)[_/.-]|[_/.-](held_?out|val|valid|test|eval)$"
)
TRAINING = re.compile(r"^(train|training)[_/.-]|[_/.-](train|training)$")
KIND = re.compile(r"_(step|epoch)$")
"""Suffixes that Lightning adds."""
UNCHARTED = {"epoch", "samples_seen"}
MAX_CURVES = 50
"""Drawn metrics. As many held-out metrics may follow."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    title: str
    curves: Mapping[str, Points]
    best: Mapping[str, Literal["min", "max"]]


@dataclass
class Metrics:
    _curves: dict[str, Curve] = field(default_factory=dict)

    def take(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add a record's metrics, except values that cannot be drawn, such as NaN."""
        for name, value in numbers.items():
            if name not in UNCHARTED and abs(value) <= MAX_VALUE:
                self._add(name, (float(step), value))

    def _add(self, name: str, point: Point) -> None:
        if name in self._curves or len(self._curves) < MAX_CURVES * (2 if is_held_out(name) else 1):
            self._curves.setdefault(name, Curve()).add(point)

    def cut(self, step: int | None) -> None:
        """Remove the points after `step`, which a restarted gang will log again. None removes all points."""
        last = -math.inf if step is None else step
        for name, curve in list(self._curves.items()):
            curve.cut(last)
            if not curve.points:
                del self._curves[name]

    def charts(self) -> Iterable[Chart]:
        groups: dict[str, list[str]] = defaultdict(list)
        for name in self._curves:
            groups[base_of(name)].append(name)
        for base, names in sorted(groups.items(), key=lambda group: _rank_of(*group)):
            names.sort(key=is_held_out)
            held_out = [name for name in names if is_held_out(name)]
            yield Chart(
                title=(base if len(names) > 1 else names[0]).replace("_", " "),
                curves={name: self._curves[name].points for name in names},
                best={name: mode for name in held_out or names if (mode := direction_of(name)) is not None},
            )


@functools.lru_cache(200)
def is_held_out(name: str) -> bool:
    return HELD_OUT.search(name) is not None


def base_of(name: str) -> str:
    """Return a name without the part that names the data: `loss` for `val_loss` or `train_loss`."""
    bare = HELD_OUT.sub("", TRAINING.sub("", name))
    if bare != name:
        bare = KIND.sub("", bare)
    return bare or name


def _rank_of(base: str, names: list[str]) -> tuple[bool, bool, bool]:
    return base != "loss", direction_of(base) is None, not any(map(is_held_out, names))
