"""The metrics of a training, as far as its Deck shows them: by step and by epoch, in a bounded number of points."""

import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from flytekitplugins.daskpytorch.report import Curve

HELD_OUT = re.compile(
    r"^(held_?out|val|valid|validation|eval|evaluation|test|dev)[_/.-]|[_/.-](held_?out|val|valid|test|eval)$"
)
"""Names of metrics of data that nothing was learnt from."""
TRAINING = re.compile(r"^(train|training)[_/.-]|[_/.-](train|training)$")
KIND = re.compile(r"_(step|epoch)$")
"""What Lightning adds to the names."""
LOW = re.compile(r"(?i)loss|error|perplexity|(^|[_/])(ppl|nll|mse|mae|rmse|cer|wer|fid)($|[_/])")
HIGH = re.compile(
    r"(?i)accuracy|precision|recall|(^|[_/])(acc|f1|auc|auroc|bleu|rouge|iou|miou|dice|map|r2|psnr)($|[_/]|\d)"
)
UNCHARTED = {"epoch", "samples_seen"}
MAX_CURVES = 50
"""Metrics that are drawn; each takes memory, and room on the page."""
MAX_VALUE = 1e200
"""What is beyond cannot be drawn."""
MAX_NEWEST = 200
"""Names whose newest value is kept."""
Points = list[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Metrics that belong together: `loss` and `val_loss`, say."""

    title: str
    by_step: Mapping[str, Points]
    by_epoch: Mapping[str, Points]
    best: Mapping[str, Literal["min", "max"]]
    """Of those that were held out, or stand alone, what is good."""


@dataclass
class Metrics:
    """What rank 0 has logged."""

    newest: dict[str, float] = field(default_factory=dict)
    is_crowded: bool = False
    """There are more metrics than are drawn."""
    epoch: float | None = None
    _steps: dict[str, Curve] = field(default_factory=dict)
    """By step, of all records but those that sum up."""
    _sums: dict[str, Curve] = field(default_factory=dict)
    """By step, of records that sum up, since they tell of data that nothing was learnt from."""
    _epochs: dict[str, Curve] = field(default_factory=dict)
    """The same by epoch."""
    _means: dict[str, Curve] = field(default_factory=dict)
    """By epoch, the means of what other records say in it."""
    _epoch_at: Curve = field(default_factory=Curve)
    """Which it was, by step."""
    _running: dict[str, tuple[int, float, float, int]] = field(default_factory=dict)
    """Of the epoch that is not over: how many values, their sum, the epoch, and the newest step."""

    def take(self, step: int, numbers: Mapping[str, float]) -> None:
        """Keep what can be drawn of what was logged at a step."""
        if (epoch := numbers.get("epoch")) is not None and abs(epoch) <= MAX_VALUE and epoch != self.epoch:
            self._epoch_at.add((step, float(step), epoch))
        self.epoch = numbers.get("epoch", self.epoch)
        sums_up = any(map(is_held_out, numbers))
        for name, value in numbers.items():
            if name in self.newest or len(self.newest) < MAX_NEWEST:
                self.newest[name] = value
            if name in UNCHARTED or not abs(value) <= MAX_VALUE:
                continue
            self._add(self._sums if sums_up else self._steps, name, step, float(step), value)
            if self.epoch is not None and abs(self.epoch) <= MAX_VALUE:
                self._take_by_epoch(name, step, self.epoch, value, sums_up=sums_up)

    def cut(self, step: int | None) -> None:
        """Forget what will be logged again, from this step on; None: all."""
        self._running.clear()
        self.newest.clear()
        self.epoch = None
        self._epoch_at.cut(step if step is not None else -(1 << 63))
        for curves in (self._steps, self._sums, self._epochs, self._means):
            for name, curve in list(curves.items()):
                if step is not None:
                    curve.cut(step)
                if step is None or not curve.points:
                    del curves[name]

    def epoch_at(self, step: int) -> float | None:
        """Which epoch this step belongs to, where one was logged by then."""
        return max(((x, epoch) for x, epoch in self._epoch_at.points if x <= step), default=(0.0, None))[1]

    def charts(self) -> Iterable[Chart]:
        """What belongs together, losses first and those of data that nothing was learnt from before others."""
        groups: dict[str, list[str]] = defaultdict(list)
        for name in dict.fromkeys((*self._steps, *self._sums)):
            groups[base_of(name)].append(name)
        for base, names in sorted(groups.items(), key=lambda group: _rank_of(*group)):
            names.sort(key=is_held_out)
            by_epoch = {name: points for name in names if (points := self._by_epoch(name))}
            held_out = [name for name in names if is_held_out(name)]
            is_judged = bool(held_out) or better(base) is not None  # a learning rate by epoch tells nothing new
            yield Chart(
                title=(base if len(names) > 1 else names[0]).replace("_", " "),
                by_step={name: self._by_step(name) for name in names},
                by_epoch=by_epoch if is_judged and any(len(points) > 1 for points in by_epoch.values()) else {},
                best={name: mode for name in held_out or names if (mode := better(name)) is not None},
            )

    def _take_by_epoch(self, name: str, step: int, epoch: float, value: float, *, sums_up: bool) -> None:
        if sums_up:
            self._add(self._epochs, name, step, epoch, value)
        elif float(epoch).is_integer():
            count, total, of, last = self._running.get(name, (0, 0.0, epoch, step))
            if of != epoch:
                self._add(self._means, name, last, of, total / count)
                count, total = 0, 0.0
            if name in self._steps:
                self._running[name] = (count + 1, total + value, epoch, step)

    def _add(self, curves: dict[str, Curve], name: str, step: int, x: float, value: float) -> None:
        if name not in curves and len(curves) == MAX_CURVES:
            self.is_crowded = True
        else:
            curves.setdefault(name, Curve()).add((step, x, value))

    def _by_step(self, name: str) -> Points:
        return (self._steps.get(name) or self._sums[name]).points

    def _by_epoch(self, name: str) -> Points:
        if (curve := self._epochs.get(name)) is not None:
            return list(dict(curve.points).items())  # of each epoch the last
        points = self._means[name].points if name in self._means else []
        count, total, epoch, _ = self._running.get(name, (0, 0.0, math.nan, 0))
        return [*points, (epoch, total / count)] if count else points


@functools.lru_cache(MAX_NEWEST)
def is_held_out(name: str) -> bool:
    """Whether it is a metric of data that nothing was learnt from."""
    return HELD_OUT.search(name) is not None


def base_of(name: str) -> str:
    """What is measured, whatever the data."""
    bare = HELD_OUT.sub("", TRAINING.sub("", name))
    if bare != name:
        bare = KIND.sub("", bare)
    return bare or name


def better(name: str) -> Literal["min", "max"] | None:
    """Whether low or high values of such a metric are good, where its name says so."""
    if LOW.search(name):
        return "min"
    return "max" if HIGH.search(name) else None


def _rank_of(base: str, names: list[str]) -> tuple[bool, bool, bool]:
    return base != "loss", better(base) is None, not any(map(is_held_out, names))
