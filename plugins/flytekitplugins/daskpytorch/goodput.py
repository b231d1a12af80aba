"""Records of a gang's time and of its ranks' use of their machines, for drivers, ranks and users."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

__all__ = ["MIN_TOTAL", "Goodput", "RankUsage"]

MIN_TOTAL = 60.0
"""Minimum number of seconds of a gang whose goodput is shown. A shorter gang spends most of its time on the start."""


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Account of a gang's wall time, in seconds. All fields but `total` add up to `total`.

    `current_rank().goodput()` returns it. A task may return it, too, as Flyte accepts dataclasses.

    Examples:
        >>> from flytekitplugins.daskpytorch import Goodput
        >>> goodput = Goodput(total=100.0, starting=1.0, preparing=3.0, stepping=90.0, saving=6.0)
        >>> goodput.share
        0.9
        >>> print(goodput)
        goodput 90 %: 90.0 s of 100.0 s stepping; starting 1.0 s, preparing 3.0 s, saving 6.0 s
    """

    total: float = 0.0
    """Seconds since the gang was asked for."""
    starting: float = 0.0
    """Seconds until all ranks have met: workers, ranks and rendezvous. Counts again after each restart."""
    preparing: float = 0.0
    """Seconds from the meeting of all ranks to the first batch or step: imports in the ranks, data and model."""
    stepping: float = 0.0
    """Seconds in steps whose work was kept, or is not yet lost."""
    data: float = 0.0
    """Seconds waiting for a data loader."""
    evaluation: float = 0.0
    """Seconds in `RankContext.evaluating`, and in the validation of Lightning and Transformers."""
    saving: float = 0.0
    """Seconds in calls of `checkpoint.save` and `checkpoint.save_sharded`."""
    waiting: float = 0.0
    """Seconds waiting for workers to come back, for other ranks to finish, and for the work at the end."""
    lost: float = 0.0
    """Seconds of work that was in no checkpoint when an attempt ended. The next attempt repeats the work, and the
    repetition counts as `stepping`, `data` and so on. `stepping` is therefore the time of an undisturbed gang."""

    @property
    def share(self) -> float:
        """The goodput: `stepping` as a share of `total`, from 0 to 1."""
        return self.stepping / self.total if self.total else 0.0

    def as_dict(self) -> dict[str, float]:
        """Return the seconds by the name of their field, `total` first."""
        return asdict(self)

    def __str__(self) -> str:
        """Return all fields in one line."""
        others = {name: value for name, value in self.as_dict().items() if name not in ("total", "stepping")}
        rest = ", ".join(f"{name} {value:.1f} s" for name, value in others.items() if value >= 0.05)
        whole = f"goodput {100 * self.share:.0f} %: {self.stepping:.1f} s of {self.total:.1f} s stepping"
        return f"{whole}; {rest}" if rest else whole


@dataclass(frozen=True, kw_only=True)
class RankUsage:
    """A rank's use of its machine, and its work so far, as `Observer.used` receives them.

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
    """The rank, from 0 to world_size - 1."""
    time: float
    """Seconds since the epoch, on the rank's clock."""
    num_steps: int
    """Number of optimizer steps in this attempt so far."""
    seconds: Mapping[str, float]
    """Seconds of the main thread in this attempt since the ranks met, by the field's name in `Goodput`: `preparing`,
    `stepping`, `data`, `evaluation`, `saving`, `waiting`."""
    cpu: float
    """Number of processor cores that the rank's process keeps busy, on average since the sample before."""
    memory: int
    """Main memory of the rank's process, in bytes."""
    gpu_memory: int | None
    """Memory in use on the rank's own GPU, by all processes, in bytes. None if the rank has not used a GPU."""
    gpu_utilization: float | None
    """Utilisation of the rank's GPU from 0 to 1, as the GPU's driver counts. None if the rank has not used a GPU, or
    NVML gives no figure."""
