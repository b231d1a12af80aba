"""Who am I: the rank's view of its gang. Runs in a rank, and in any ordinary process as rank 0 of 1."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["LogRecord", "RankContext", "current_rank"]

logger = logging.getLogger("flytekitplugins.daskpytorch")


@dataclass(frozen=True, kw_only=True)
class LogRecord:
    """One call of `RankContext.log`."""

    rank: int
    """The rank that logged."""
    step: int
    """The step given, or the number of calls before this one."""
    num_steps: int | None
    """How many steps there will be, where the rank knows."""
    time: float
    """Seconds since the epoch, on the rank's clock."""
    metrics: Mapping[str, Any]
    """Names and values; plain numbers and strings where they can be made so."""

    @property
    def numbers(self) -> dict[str, float]:
        """The metrics that are numbers, as floats."""
        return {name: float(value) for name, value in self.metrics.items() if isinstance(value, (int, float))}


@dataclass
class RankContext:
    """This process's place in the gang, and its ways to report. Outside a gang: rank 0 of 1."""

    rank: int = 0
    """0 … world_size - 1; rank 0's return value is the task's output."""
    local_rank: int = 0
    """0 … local_world_size - 1, among the ranks of one worker."""
    world_size: int = 1
    """The number of ranks in the gang."""
    local_world_size: int = 1
    """The number of ranks on this worker."""
    sink: Callable[[LogRecord], None] | None = field(default=None, repr=False)
    """Where log records go; None outside a gang."""
    _num_logged: int = field(default=0, repr=False)

    @property
    def is_main(self) -> bool:
        """True on rank 0."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """The rank's device: `cuda:0`, since a rank sees only its own GPU, or `cpu`."""
        import torch  # late, so that a driver that only asks for its rank stays light

        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

    def log(self, metrics: Mapping[str, Any], step: int | None = None, *, num_steps: int | None = None) -> None:
        """Report metrics, without waiting for anyone.

        Rank 0's values feed Weights & Biases, the live progress and the Deck; every rank's are kept by the driver.
        The names `epoch`, `loss` and `samples_per_second` have their own places in the progress display.

        Args:
            metrics: Names and values. Numbers and one-element tensors (read with `.item()`, which waits for the
                device) go everywhere; other objects, such as `wandb.Image`, go to Weights & Biases alone.
            step: The step the values belong to; by default the number of earlier calls.
            num_steps: How many steps there will be, for the length of the progress bar.
        """
        record = LogRecord(
            rank=self.rank,
            step=self._num_logged if step is None else int(step),
            num_steps=num_steps,
            time=time.time(),
            metrics={str(name): _plain(value) for name, value in metrics.items()},
        )
        self._num_logged += 1
        if self.sink is not None:
            self.sink(record)
        else:
            logger.info("step %d: %s", record.step, ", ".join(f"{n}={v}" for n, v in record.metrics.items()))


def current_rank() -> RankContext:
    """The context of this rank; in a process that no gang started, rank 0 of 1.

    A process that a rank forked (a DataLoader worker, say) is not a rank: it gets a copy that reports nowhere.
    """
    pid, context = _current
    if pid == os.getpid():
        return context
    return RankContext(
        rank=context.rank,
        local_rank=context.local_rank,
        world_size=context.world_size,
        local_world_size=context.local_world_size,
    )


def enter(context: RankContext) -> None:
    """Make `context` this process's own."""
    global _current
    _current = (os.getpid(), context)


def _plain(value: Any) -> Any:
    """A one-element tensor, array or NumPy scalar as the Python number it holds; anything else as it is."""
    num_elements = value.numel() if hasattr(value, "numel") else getattr(value, "size", None)
    if num_elements == 1 and hasattr(value, "item"):
        return value.item()
    return value


_current: tuple[int, RankContext] = (os.getpid(), RankContext())
