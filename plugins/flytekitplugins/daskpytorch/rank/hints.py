"""Says once what looks forgotten, and would otherwise train on in silence. Runs in a rank."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from flytekitplugins.daskpytorch.protocol.reports import Hint

if TYPE_CHECKING:
    from flytekitplugins.daskpytorch.context import LogRecord

__all__ = ["of_exchange", "of_loss", "watch_samplers"]


def of_loss(record: LogRecord) -> Hint | None:
    """Whether a loss that was logged is no number any more."""
    for name, value in record.metrics.items():
        if "loss" in name.lower() and isinstance(value, float) and not math.isfinite(value):
            return Hint(
                "loss",
                f"logged {name}={value} at step {record.step}: most often nothing is learned from there on. Lower the "
                "learning rate, clip gradients, or look for such values in the data.",
            )
    return None


def of_exchange(num_collectives: int | None, world_size: int) -> Hint | None:
    """Whether a rank has trained on its own; the number is None where nobody knows."""
    if world_size == 1 or num_collectives != 0:
        return None
    return Hint(
        "exchange",
        f"has returned without a single collective among {world_size} ranks: if they were to train one model, each has "
        "trained one of its own. Is it wrapped in DistributedDataParallel?",
    )


def watch_samplers(tell: Callable[[Hint], object]) -> None:
    """Tell of a shuffling `DistributedSampler` that begins again with the epoch that it had before.

    Its order follows from its seed and its epoch alone, and so does not change by itself.
    """
    from torch.utils.data.distributed import DistributedSampler

    begin = DistributedSampler.__iter__
    epochs: WeakKeyDictionary[DistributedSampler[Any], int] = WeakKeyDictionary()

    @functools.wraps(begin)
    def begin_watched(sampler: DistributedSampler[Any]) -> Iterator[Any]:
        if sampler.shuffle and epochs.get(sampler) == sampler.epoch:
            tell(
                Hint(
                    "sampler",
                    f"goes through a shuffling DistributedSampler again with epoch {sampler.epoch}, and so in the same "
                    "order: call its set_epoch(epoch) before each epoch.",
                )
            )
        epochs[sampler] = sampler.epoch
        return begin(sampler)

    DistributedSampler.__iter__ = begin_watched  # type: ignore[method-assign]
