"""Where a gang's time goes, and what its ranks use of their machines: records, read by drivers, ranks and users."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from flytekitplugins.daskpytorch.documented import documented

__all__ = ["MIN_TOTAL", "Goodput", "RankUsage"]

MIN_TOTAL = 60.0
"""Seconds from which on a gang's goodput is shown to people: of a shorter gang most is its start."""


@documented
@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Where a gang's time has gone: seconds of its wall time, all of which add up to `total`.

    A task may return one, as `current_rank().goodput()` gives it: Flyte takes it as any dataclass.

    Examples:
        >>> from flytekitplugins.daskpytorch import Goodput
        >>> goodput = Goodput(total=100.0, starting=1.0, preparing=3.0, stepping=90.0, saving=6.0)
        >>> goodput.share
        0.9
        >>> print(goodput)
        goodput 90 %: 90.0 s of 100.0 s stepping; starting 1.0 s, preparing 3.0 s, saving 6.0 s
    """

    total: float = 0.0
    """From the moment that the gang was asked for."""
    starting: float = 0.0
    """Until all ranks have met: workers, ranks, the rendezvous; and again whenever the gang has started anew."""
    preparing: float = 0.0
    """From then on until the first batch or step: imports in the ranks, and the user's code before it (data, model)."""
    stepping: float = 0.0
    """In steps whose work was kept, or is not yet lost."""
    data: float = 0.0
    """Waiting for a data loader."""
    evaluation: float = 0.0
    """In `RankContext.evaluating`, and in the validation of Lightning and of Transformers."""
    saving: float = 0.0
    """In `checkpoint.save` and `checkpoint.save_sharded`, which the training waits for."""
    waiting: float = 0.0
    """For workers to come back, for other ranks to finish, for what is left to do at the end."""
    lost: float = 0.0
    """In work that was done in vain: no checkpoint held it when an attempt ended. When it is done again it is kept, and
    counts as what it is: `stepping` is what a gang that was never disturbed would have needed."""

    @property
    def share(self) -> float:
        """The steps' part of the whole, from 0 to 1: what is called the goodput."""
        return self.stepping / self.total if self.total else 0.0

    def as_dict(self) -> dict[str, float]:
        """Each of the seconds by its name, `total` first."""
        return asdict(self)

    def __str__(self) -> str:
        """All in one line."""
        others = {name: value for name, value in self.as_dict().items() if name not in ("total", "stepping")}
        rest = ", ".join(f"{name} {value:.1f} s" for name, value in others.items() if value >= 0.05)
        whole = f"goodput {100 * self.share:.0f} %: {self.stepping:.1f} s of {self.total:.1f} s stepping"
        return f"{whole}; {rest}" if rest else whole


@documented
@dataclass(frozen=True, kw_only=True)
class RankUsage:
    """What a rank uses of its machine, and what it has done so far: what `Observer.used` is told.

    Examples:
        >>> from flytekitplugins.daskpytorch import Observer, RankUsage
        >>> class Memory(Observer):
        ...     def used(self, usage: RankUsage) -> None:
        ...         print(f"rank {usage.rank}: {usage.memory / 2**30:.1f} GiB, {usage.cpu:.1f} cores")
        >>> of_gpu = {"gpu_memory": None, "gpu_utilization": None}
        >>> Memory().used(RankUsage(rank=1, time=0.0, num_steps=8, seconds={}, cpu=0.9, memory=3 * 2**30, **of_gpu))
        rank 1: 3.0 GiB, 0.9 cores
    """

    rank: int
    """Whose this is; 0 … world_size - 1."""
    time: float
    """Seconds since the epoch, on the rank's clock."""
    num_steps: int
    """Optimizer steps of this attempt so far."""
    seconds: Mapping[str, float]
    """Of this attempt so far, since the ranks have met: by the names in `Goodput` what the main thread has spent on
    `preparing`, `stepping`, `data`, `evaluation`, `saving` and `waiting`."""
    cpu: float
    """Processor cores that are busy with the rank's process, on average since the sample before."""
    memory: int
    """Bytes of the rank's process that are in main memory."""
    gpu_memory: int | None
    """Bytes that are taken of the rank's own GPU, by whomever; None where it has not used one."""
    gpu_utilization: float | None
    """From 0 to 1, as the driver of the GPU counts; None where the rank has not used one, or nobody can tell."""
