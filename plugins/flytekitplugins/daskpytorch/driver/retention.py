"""Which checkpoints stay: the last ones, and the best. Runs in the driver, for its disk and for storage alike."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from flytekitplugins.daskpytorch.context import SavedCheckpoint
from flytekitplugins.daskpytorch.settings import Keep


class Entry(Protocol):
    """A checkpoint of any kind."""

    @property
    def step(self) -> int:
        """Training step of the checkpoint."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics that the checkpoint was saved with."""


E = TypeVar("E", bound=Entry)


def best_first(entries: Iterable[E], keep: Keep) -> list[E]:
    """Return the entries whose metric is a number, the best first; of one step only the newest.

    Of equal ones the earlier comes first.

    Args:
        entries: In the order in which they were kept.
        keep: What they are the best by. Without a metric none is.
    """
    metric, sign = keep.metric, {"min": 1, "max": -1}[keep.mode]
    if metric is None:
        return []
    measured = {entry.step: entry for entry in entries if not math.isnan(entry.metrics.get(metric, math.nan))}
    return sorted(measured.values(), key=lambda entry: sign * entry.metrics[metric])


def find(entries: Sequence[E], keep: Keep, step: int | None) -> E | None:
    """Return the newest entry of a step or, with None, the best; None if there is none."""
    found = best_first(entries, keep) if step is None else [entry for entry in entries[::-1] if entry.step == step]
    return found[0] if found else None


def retained(entries: Sequence[E], keep: Keep) -> list[E]:
    """Return the entries that stay, in the order in which they were kept, as they are given.

    The newest is always among them.
    """
    stay = {id(entry) for entry in (*entries[-keep.last :], *best_first(entries, keep)[: keep.best])}
    return [entry for entry in entries if id(entry) in stay]


def listed(*kinds: Iterable[SavedCheckpoint]) -> tuple[SavedCheckpoint, ...]:
    """Return checkpoints of all kinds by step, as a user is told of them."""
    return tuple(sorted((saved for kind in kinds for saved in kind), key=lambda saved: saved.step))


def hint_of_metric(kept: Iterable[Entry], keep: Keep) -> str | None:
    """Return a hint if no checkpoint can be the best: none that has metrics has the one that counts."""
    names = {name for one in kept for name in one.metrics}
    if keep.best == 0 or not names or keep.metric in names:
        return None
    return (
        f"Keep(best={keep.best}, metric={keep.metric!r}): no checkpoint was saved with that metric so far, and so "
        f"none is kept as the best; they have: {', '.join(sorted(names))}"
    )
