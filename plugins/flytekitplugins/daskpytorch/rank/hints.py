"""Hints of likely mistakes that raise no error, each reported once. Runs in a rank."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from flytekitplugins.daskpytorch.protocol.messages import Noted

if TYPE_CHECKING:
    from flytekitplugins.daskpytorch.rank.usage import Ledger
    from flytekitplugins.daskpytorch.records import LogRecord


SAMPLER = (
    "trains again on a shuffling DistributedSampler with epoch {}, and so in the same order: call its set_epoch(epoch) "
    "before each epoch."
)


def of_loss(record: LogRecord) -> Noted | None:
    """Return a hint if a logged loss is infinite or NaN."""
    for name, value in record.metrics.items():
        if "loss" in name.lower() and isinstance(value, float) and not math.isfinite(value):
            return Noted(
                f"logged {name}={value} at step {record.step}: most often nothing is learned from there on. Lower the "
                "learning rate, clip gradients, or look for such values in the data.",
                "loss",
            )
    return None


def of_exchange(num_collectives: int | None, world_size: int, *, has_trained: bool) -> Noted | None:
    """Return a hint if a rank has trained without collectives, although its gang has several ranks.

    Args:
        num_collectives: Number of the rank's collectives. None if unknown, which gives no hint.
        world_size: Number of ranks in the gang.
        has_trained: True if an optimizer has made a step.
    """
    if not has_trained or world_size == 1 or num_collectives != 0:
        return None
    return Noted(
        f"has returned without a single collective among {world_size} ranks: if they were to train one model, each has "
        "trained one of its own. Is it wrapped in DistributedDataParallel?",
        "exchange",
    )


def of_variables(late: Sequence[str]) -> Noted | None:
    """Return a hint if the user's code has set variables of the environment that torch or a library had read before."""
    if not late:
        return None
    return Noted(
        f"has set {', '.join(late)} too late: torch, or a library such as OpenMP or NCCL, had read the old values. "
        "Give such variables by Gang(environment={...}).",
        "variables",
    )


@contextlib.contextmanager
def watching_samplers(ledger: Ledger, tell: Callable[[Noted], object]) -> Iterator[None]:
    """During the block, report a `DistributedSampler` that shuffles two epochs of training into the same order.

    A sampler's order depends on its seed and its epoch alone. An epoch counts once an optimizer has made a step between
    two indices of the sampler, so evaluations do not count. A sampler whose `set_epoch` was called gets no hint.

    Args:
        ledger: Counts the optimizers' steps.
        tell: Reports the hint.
    """
    from torch.utils.data.distributed import DistributedSampler

    begin, set_epoch = DistributedSampler.__iter__, DistributedSampler.set_epoch
    trained: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
    """Sampler -> its `epoch` in the newest pass in which an optimizer made a step."""
    has_epochs: WeakSet[Any] = WeakSet()

    def begin_noted(sampler: DistributedSampler[Any]) -> Iterator[int]:
        return noted(sampler, begin(sampler), sampler.epoch, ledger.num_steps)  # draws the order here, as without hints

    def noted(sampler: DistributedSampler[Any], indices: Iterator[int], epoch: int, num_steps: int) -> Iterator[int]:
        has_trained = False
        for index in indices:
            yield index
            if not has_trained and ledger.num_steps > num_steps:
                has_trained = True
                if sampler.shuffle and sampler not in has_epochs and trained.get(sampler) == epoch:
                    tell(Noted(SAMPLER.format(epoch), "sampler"))
                trained[sampler] = epoch

    def set_epoch_noted(sampler: DistributedSampler[Any], epoch: int) -> None:
        has_epochs.add(sampler)
        set_epoch(sampler, epoch)

    samplers: Any = DistributedSampler
    samplers.__iter__ = functools.wraps(begin)(begin_noted)
    samplers.set_epoch = functools.wraps(set_epoch)(set_epoch_noted)
    try:
        yield
    finally:
        samplers.__iter__, samplers.set_epoch = begin, set_epoch
