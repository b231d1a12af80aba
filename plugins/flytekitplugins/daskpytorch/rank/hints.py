"""Says once what looks forgotten, and would otherwise train on in silence. Runs in a rank."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from flytekitplugins.daskpytorch.protocol import torch_parts
from flytekitplugins.daskpytorch.protocol.program import FIRST_OWN_SEED
from flytekitplugins.daskpytorch.protocol.reports import Hint

if TYPE_CHECKING:
    import torch

    from flytekitplugins.daskpytorch.context import LogRecord


SAMPLER = (
    "trains again on a shuffling DistributedSampler with epoch {}, and so in the same order: call its set_epoch(epoch) "
    "before each epoch."
)


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


def of_exchange(num_collectives: int | None, world_size: int, *, has_trained: bool) -> Hint | None:
    """Whether a rank has trained on its own; the number is None where nobody knows."""
    if not has_trained or world_size == 1 or num_collectives != 0:
        return None
    return Hint(
        "exchange",
        f"has returned without a single collective among {world_size} ranks: if they were to train one model, each has "
        "trained one of its own. Is it wrapped in DistributedDataParallel?",
    )


def watch_optimizers() -> Callable[[], bool]:
    """Return what tells whether any optimizer has taken a step from now on: else nothing was trained."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    stepped = threading.Event()
    register_optimizer_step_post_hook(lambda *_: stepped.set())
    return stepped.is_set


def of_nccl(before: Mapping[str, str], after: Mapping[str, str]) -> Hint | None:
    """Return a hint if the function has set variables that NCCL has read before; both are its variables."""
    late = sorted(name for name, value in after.items() if before.get(name) != value)
    if not late:
        return None
    return Hint(
        "nccl",
        f"has set {', '.join(late)} in the function, after NCCL had read its variables: they had no effect. Set them "
        "in the task's environment, or at the top of a module that the function's module imports.",
    )


def of_seed(seed: int | None, state: torch.Tensor) -> Hint | None:
    """Return a hint if the script has seeded torch, the rank has not, and the rank has drawn random numbers.

    Args:
        seed: The script's; None if it has set none.
        state: Of this rank's generator when the function began.
    """
    import torch

    if seed is None or torch.initial_seed() < FIRST_OWN_SEED or torch.equal(state, torch.get_rng_state()):
        return None
    return Hint(
        "seed",
        f"has drawn random numbers with a seed of its own, though the script has called torch.manual_seed({seed}): "
        "ranks do not run the script's top again. Call it inside the function for the same numbers each time.",
    )


@contextlib.contextmanager
def watching_samplers(tell: Callable[[Hint], object]) -> Iterator[None]:
    """Tell, in this block, of a shuffling `DistributedSampler` that two epochs train on in the same order.

    Its order follows from its seed and its epoch alone. An epoch counts once an optimizer has made a step with a batch
    of it: not a batch that was only looked at, and no evaluation. A sampler whose `set_epoch` is called is left alone.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from torch.utils.data.distributed import DistributedSampler

    batches = torch_parts.loader_iterator()
    begin, set_epoch, take = DistributedSampler.__iter__, DistributedSampler.set_epoch, batches.__next__
    num_begun: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
    trained: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()
    """Sampler -> number and epoch of the last pass that an optimizer made a step in."""
    has_epochs: WeakSet[Any] = WeakSet()
    latest: list[Any] = [None]
    """Sampler of the loader that gave the last batch."""

    def begin_counted(sampler: DistributedSampler[Any]) -> Iterator[Any]:
        num_begun[sampler] = num_begun.get(sampler, 0) + 1
        return begin(sampler)

    def set_epoch_noted(sampler: DistributedSampler[Any], epoch: int) -> None:
        has_epochs.add(sampler)
        set_epoch(sampler, epoch)

    def take_noted(loader: Any) -> Any:
        latest[0] = torch_parts.sampler_of(loader)
        return take(loader)

    def note_step(*_: object) -> None:
        sampler = latest[0]
        if not isinstance(sampler, DistributedSampler) or not sampler.shuffle or sampler in has_epochs:
            return
        now = num_begun.get(sampler, 0), sampler.epoch
        number, epoch = trained.get(sampler, now)
        trained[sampler] = now
        if number != now[0] and epoch == now[1]:
            tell(Hint("sampler", SAMPLER.format(epoch)))

    patched: list[tuple[type, str, Any, Any]] = [(DistributedSampler, "__iter__", begin, begin_counted)]
    patched += [(DistributedSampler, "set_epoch", set_epoch, set_epoch_noted), (batches, "__next__", take, take_noted)]
    for owner, name, original, noted in patched:
        setattr(owner, name, functools.wraps(original)(noted))
    hook = register_optimizer_step_post_hook(note_step)
    try:
        yield
    finally:
        hook.remove()
        for owner, name, original, _ in patched:
            setattr(owner, name, original)
