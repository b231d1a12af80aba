"""Which checkpoints stay: the last ones, and the best. Runs in the driver, for its disk and for storage alike."""

from collections.abc import Iterable, Sequence

from flytekitplugins.daskpytorch.context import SavedCheckpoint
from flytekitplugins.daskpytorch.protocol.best import E, Entry, best_first
from flytekitplugins.daskpytorch.settings import Keep


def retained(entries: Sequence[E], keep: Keep) -> list[E]:
    """Those that stay of `entries`, which are in the order in which they were kept; in the same order.

    The newest is always among them.
    """
    stay = {id(entry) for entry in (*entries[-keep.last :], *best_first(entries, keep)[: keep.best])}
    return [entry for entry in entries if id(entry) in stay]


def listed(*kinds: Iterable[SavedCheckpoint]) -> tuple[SavedCheckpoint, ...]:
    """Checkpoints of all kinds, as a user is told of them: by step."""
    return tuple(sorted((saved for kind in kinds for saved in kind), key=lambda saved: saved.step))


def hint_of_metric(kept: Iterable[Entry], keep: Keep) -> str | None:
    """What to say where none can be the best, as with a misspelt name: all with metrics lack the one that counts."""
    names = {name for one in kept for name in one.metrics}
    if keep.best == 0 or not names or keep.metric in names:
        return None
    return (
        f"Keep(best={keep.best}, metric={keep.metric!r}): no checkpoint was saved with that metric so far, and so "
        f"none is kept as the best; they have: {', '.join(sorted(names))}"
    )
