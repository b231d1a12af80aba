"""Which checkpoints are the best: for the driver, which keeps those, and for ranks, which load them."""

import math
from collections.abc import Iterable, Mapping
from typing import Protocol, TypeVar

from flytekitplugins.daskpytorch.settings import Keep


class Entry(Protocol):
    """A checkpoint of any kind."""

    @property
    def step(self) -> int:
        """The training step that it belongs to."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """What it was saved with."""


E = TypeVar("E", bound=Entry)


def best_first(entries: Iterable[E], keep: Keep) -> list[E]:
    """Those of `entries` whose metric is a number; of equal ones the earlier comes first, of one step only the newest.

    Args:
        entries: In the order in which they were kept.
        keep: What they are the best by. Without a metric none is.
    """
    metric, sign = keep.metric, {"min": 1, "max": -1}[keep.mode]
    if metric is None:
        return []
    measured = {entry.step: entry for entry in entries if not math.isnan(entry.metrics.get(metric, math.nan))}
    return sorted(measured.values(), key=lambda entry: sign * entry.metrics[metric])
