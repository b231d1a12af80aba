"""Metrics of a training for the Deck, by step and by epoch, with a bounded number of points."""

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
"""Drawn metrics. Those of records with held-out metrics count separately."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    title: str
    by_step: Mapping[str, Points]
    by_epoch: Mapping[str, Points]
    best: Mapping[str, Literal["min", "max"]]


@dataclass
class Metrics:
    is_crowded: bool = False
    epoch: float | None = None
    _step: float = -math.inf
    _steps: dict[str, Curve] = field(default_factory=dict)
    """Over steps, without metrics of held-out data, such as `val_loss`.

    Of a record with such metrics, the other values sum up an epoch if the step has had its record before.
    """
    _sums: dict[str, Curve] = field(default_factory=dict)
    """Over epochs, from records with metrics of held-out data. An unknown epoch is NaN."""
    _epoch_at: Curve = field(default_factory=Curve)

    def take(self, step: int, numbers: Mapping[str, float], *, is_evaluation: bool = False) -> None:
        """Add a record's metrics, except values that cannot be drawn, such as NaN.

        A late record of an evaluation belongs to the epoch of its step.
        """
        epoch = numbers.get("epoch")
        if is_evaluation:
            epoch = self.epoch_at(step) if epoch is None else epoch
        else:
            if epoch is not None and abs(epoch) <= MAX_VALUE and epoch != self.epoch:
                self._epoch_at.add((step, float(step), epoch))
            self.epoch = epoch = numbers.get("epoch", self.epoch)
        sums_up = any(map(is_held_out, numbers))
        is_new = not is_evaluation and step > self._step
        self._step = step if is_new else self._step
        x = epoch if epoch is not None and abs(epoch) <= MAX_VALUE else math.nan
        for name, value in numbers.items():
            if name in UNCHARTED or not abs(value) <= MAX_VALUE:
                continue
            if sums_up:
                self._add(self._sums, name, (step, x, value))
            if not sums_up or (is_new and not is_held_out(name)):
                self._add(self._steps, name, (step, float(step), value))

    def _add(self, curves: dict[str, Curve], name: str, point: Point) -> None:
        if name not in curves and len(curves) == MAX_CURVES:
            self.is_crowded = True
        else:
            curves.setdefault(name, Curve()).add(point)

    def cut(self, step: int | None) -> None:
        """Remove the points after `step`, which a restarted gang will log again. None removes all points."""
        self.epoch = None
        self._step = -math.inf if step is None else min(self._step, step)
        self._epoch_at.cut(step if step is not None else -(1 << 63))
        for curves in (self._steps, self._sums):
            for name, curve in list(curves.items()):
                if step is not None:
                    curve.cut(step)
                if step is None or not curve.kept:
                    del curves[name]

    def epoch_at(self, step: int) -> float | None:
        return max(((x, epoch) for x, epoch in self._epoch_at.points if x <= step), default=(0.0, None))[1]

    def charts(self) -> Iterable[Chart]:
        groups: dict[str, list[str]] = defaultdict(list)
        for name in dict.fromkeys((*self._steps, *self._sums)):
            groups[base_of(name)].append(name)
        for base, names in sorted(groups.items(), key=lambda group: _rank_of(*group)):
            names.sort(key=is_held_out)
            by_epoch = {name: points for name in names if (points := self._by_epoch(name))}
            held_out = [name for name in names if is_held_out(name)]
            is_judged = bool(held_out) or direction_of(base) is not None  # a learning rate by epoch has no news
            yield Chart(
                title=(base if len(names) > 1 else names[0]).replace("_", " "),
                by_step={name: self._by_step(name) for name in names},
                by_epoch=by_epoch if is_judged and any(len(points) > 1 for points in by_epoch.values()) else {},
                best={name: mode for name in held_out or names if (mode := direction_of(name)) is not None},
            )

    def _by_step(self, name: str) -> Points:
        curve = self._steps.get(name) or self._sums[name]
        return [(float(step), value) for step, _, value in curve.kept]

    def _by_epoch(self, name: str) -> Points:
        points = self._sums[name].points if name in self._sums else []
        return list({epoch: value for epoch, value in points if not math.isnan(epoch)}.items())


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
