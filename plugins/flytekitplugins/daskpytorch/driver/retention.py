"""Which checkpoints stay: the last ones, and the best. Runs in the driver, for its disk and for storage alike."""

from collections.abc import Sequence

from flytekitplugins.daskpytorch.protocol.best import E, best_first
from flytekitplugins.daskpytorch.settings import Keep

__all__ = ["retained"]


def retained(entries: Sequence[E], keep: Keep) -> list[E]:
    """Those that stay of `entries`, which are in the order in which they were kept; in the same order.

    The newest is always among them.
    """
    stay = {id(entry) for entry in (*entries[-keep.last :], *best_first(entries, keep)[: keep.best])}
    return [entry for entry in entries if id(entry) in stay]
