"""Records of a training for drivers, ranks and users: metrics and drawings, checkpoints, time, and use of machines."""

from __future__ import annotations

import io
import math
import reprlib
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from flytekitplugins.daskpytorch.checks import require_extra

__all__ = ["MIN_TOTAL", "Goodput", "Histogram", "LogRecord", "Picture", "RankUsage", "SavedCheckpoint", "numbers"]

NUM_BINS = 64
"""The default of Weights & Biases."""


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """Histogram of values as a metric, for `current_rank().log({"weights": Histogram.of(model.weight)})`.

    Examples:
        >>> from flytekitplugins.daskpytorch import Histogram
        >>> histogram = Histogram.of([0.5, 1.5, 1.5, float("nan")])
        >>> sum(histogram.counts), histogram.edges[0], histogram.edges[-1]
        (3.0, 0.5, 1.5)
    """

    counts: tuple[float, ...]
    """Number of values in each bin."""
    edges: tuple[float, ...]
    """Edges of the bins, from low to high: one edge more than bins."""

    @classmethod
    def of(cls, values: Any) -> Histogram:
        """Return the histogram of a tensor, array or list of any shape, in 64 bins. Ignores NaN and infinity."""
        import torch

        flat = torch.as_tensor(values).detach().to_dense().float().flatten().cpu()
        counts, edges = flat[flat.isfinite()].histogram(NUM_BINS)
        return cls(counts=tuple(counts.tolist()), edges=tuple(edges.tolist()))


@dataclass(frozen=True, kw_only=True)
class Picture:
    """PNG picture as a metric, for `current_rank().log({"sample": Picture.of(image)})`.

    Examples:
        >>> import torch
        >>> from flytekitplugins.daskpytorch import Picture
        >>> from torchvision.transforms.functional import to_pil_image
        >>> picture = Picture.of(to_pil_image(torch.rand(3, 32, 48)), "noise")
        >>> picture.width, picture.height, picture.caption
        (48, 32, 'noise')
    """

    png: bytes = field(repr=False)
    """The picture as the bytes of a PNG file."""
    width: int
    """Width in pixels."""
    height: int
    """Height in pixels."""
    caption: str = ""
    """Text below the picture, in trackers that show captions."""

    @classmethod
    def of(cls, picture: Any, caption: str = "") -> Picture:
        """Convert a Pillow image or a matplotlib figure to a `Picture`.

        The conversion to PNG takes some milliseconds for a small picture.

        Args:
            picture: A Pillow image or a matplotlib figure. torchvision's `to_pil_image(tensor)`, and Pillow's
                `Image.fromarray(array)`, make an image of pixels.
            caption: Text below the picture.

        Raises:
            ImportError: The extra `pictures` is not installed. The trackers' extras include `pictures`.
            TypeError: `picture` is of another type.
        """
        require_extra("pictures", "Picture.of(...)")
        file = io.BytesIO()
        save = getattr(picture, "savefig", None) or getattr(picture, "save", None)
        if save is None:
            raise TypeError(f"Picture.of({reprlib.repr(picture)}): must be a Pillow image or a matplotlib figure")
        save(file, format="png")
        from PIL import Image

        width, height = Image.open(file).size
        return cls(png=file.getvalue(), width=width, height=height, caption=caption)

    def image(self) -> Any:
        """Return the picture as a Pillow image."""
        from PIL import Image

        return Image.open(io.BytesIO(self.png))


MIN_TOTAL = 60.0
"""Seconds from which on the log and the Deck's head show a gang's goodput.

A shorter gang spends most of its time on the start.
"""
BILL = ("gpu_hours", "core_hours", "trained_hours", "cost")
MAX_BITS = sys.float_info.max_exp - 1
"""Bits of a whole number, with which each is below the largest float."""
PLAIN: Mapping[type, Callable[[Any], Any]] = {bool: bool, int: int.__int__, float: float.__float__, str: str.__str__}
"""Types that every process can unpickle, and functions that make their subclasses plain."""


@dataclass(frozen=True, kw_only=True)
class LogRecord:
    """One call of `RankContext.log`, as `Observer.on_log` receives it.

    Examples:
        >>> from flytekitplugins.daskpytorch import LogRecord, Observer
        >>> class Lowest(Observer):
        ...     loss = float("inf")
        ...
        ...     def on_log(self, record: LogRecord) -> None:
        ...         self.loss = min(self.loss, record.numbers.get("loss", self.loss))
        >>> lowest = Lowest()
        >>> lowest.on_log(LogRecord(rank=0, step=7, num_steps=None, time=0.0, metrics={"loss": 0.5, "note": "warm"}))
        >>> lowest.loss
        0.5
    """

    rank: int
    """Rank that logged the record."""
    step: int
    """The call's `step`, by default the number of earlier calls."""
    num_steps: int | None
    """Total number of steps of the training. None: not given."""
    time: float
    """Seconds since the epoch, on the rank's clock."""
    metrics: Mapping[str, Any]
    """Values by name. One-element tensors and arrays have become plain numbers."""
    is_evaluation: bool = False
    """True for the metrics of `Gang(evaluate=...)`. `step` is the step of the evaluated checkpoint, which may be lower
    than the steps of earlier records."""

    @classmethod
    def of(cls, rank: int, step: Any, num_steps: Any, metrics: Mapping[str, Any]) -> Self:
        """Return the record of a call of `log`. Raises the error of `int` for a step that is no number."""
        return cls(
            rank=rank,
            step=int(step),
            num_steps=None if num_steps is None else int(num_steps),
            time=time.time(),
            metrics={str(name): _plain(value) for name, value in metrics.items()},
        )

    @property
    def numbers(self) -> dict[str, float]:
        """Numeric metrics by name, as floats."""
        return {name: float(value) for name, value in self.metrics.items() if isinstance(value, (int, float))}

    @property
    def texts(self) -> dict[str, str]:
        """Metrics that are strings, by name."""
        return {name: value for name, value in self.metrics.items() if isinstance(value, str)}

    @property
    def epoch(self) -> int | None:
        """The metric `epoch` as a whole number. None if `epoch` is missing or not a finite number."""
        value = self.metrics.get("epoch")
        return int(value) if isinstance(value, (int, float)) and math.isfinite(value) else None

    @property
    def drawings(self) -> dict[str, Histogram | Picture]:
        """Each `Histogram` and `Picture`, by name."""
        return {name: value for name, value in self.metrics.items() if type(value) in (Histogram, Picture)}

    def sent(self) -> Self:
        """Return the record as a rank sends it to the driver: numbers and strings, and from rank 0 drawings."""
        bare = self.bare()
        return replace(bare, metrics={**bare.metrics, **self.drawings}) if self.rank == 0 else bare

    def bare(self) -> Self:
        """Return the record with its numbers and strings alone."""
        return replace(self, metrics={name: value for name, value in self.metrics.items() if type(value) in PLAIN})


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """Description of a checkpoint that the gang keeps.

    Examples:
        Load the best checkpoint at the end of the training:

        >>> from flytekitplugins.daskpytorch import Gang, Keep, current_rank, dispatch
        >>> def train() -> tuple[int, float]:
        ...     checkpoint = current_rank().checkpoint
        ...     for step, loss in enumerate([0.5, 0.2, 0.3, 0.4]):
        ...         checkpoint.save({"step": step}, step, metrics={"loss": loss})
        ...         checkpoint.flush()  # since these steps take no time
        ...     checkpoint.load(best=True)
        ...     return checkpoint.loaded.step, checkpoint.loaded.metrics["loss"]
        >>> dispatch.run(client, train, gang=Gang(keep=Keep(best=1, metric="loss"))).result()[0]
        (1, 0.2)
    """

    step: int
    """Training step of the saved state."""
    metrics: Mapping[str, float]
    """Metrics that were given to the save, by name."""
    size: int
    """Size in bytes."""
    place: str | None
    """Address in storage: the checkpoint's file, or the folder of a sharded checkpoint. The file's upload may still be
    in progress. None without storage: the driver's disk has the only copy."""


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Account of a gang's wall time, in seconds, and of its workers' hours. All seconds but `total` add up to `total`.

    `futures.goodput` of `dispatch.run`, and `goodput` of a model of `dispatch.map`, are a `Goodput`.

    Examples:
        >>> from flytekitplugins.daskpytorch import Goodput
        >>> goodput = Goodput(total=100.0, starting=1.0, preparing=3.0, stepping=90.0, saving=6.0)
        >>> goodput.share
        0.9
        >>> print(goodput)
        goodput 90 %: 90.0 s of 100.0 s stepping; starting 1.0 s, preparing 3.0 s, saving 6.0 s
    """

    total: float = 0.0
    """Seconds since the call that asked for the gang."""
    starting: float = 0.0
    """Seconds until all ranks have met: workers, ranks and rendezvous. Counts again after each restart."""
    preparing: float = 0.0
    """Seconds from the meeting of all ranks to the first batch or step: imports in the ranks, data and model."""
    stepping: float = 0.0
    """Seconds in steps whose work was kept, or is not yet lost."""
    data: float = 0.0
    """Seconds waiting for a data loader."""
    compiling: float = 0.0
    """Seconds in compilations of `torch.compile`, those of the backward pass on a GPU excepted."""
    evaluation: float = 0.0
    """Seconds in `RankContext.evaluating`, and in the validation of Lightning and Transformers."""
    saving: float = 0.0
    """Seconds in calls of `checkpoint.save` and `checkpoint.save_sharded`."""
    waiting: float = 0.0
    """Seconds of waiting for lost workers to come back, and seconds of rank 0 after its last step. At the end, also
    seconds of waiting for other ranks and for the last checkpoint."""
    lost: float = 0.0
    """Seconds of work that was in no checkpoint when an attempt ended. The next attempt repeats the work, and the
    repetition counts as `stepping`, `data` and so on. `stepping` is therefore the time of an undisturbed gang."""
    gpu_hours: float = 0.0
    """Hours of all GPUs of the gang's workers, over all attempts of the Flyte task, from the first ranks' start on."""
    core_hours: float = 0.0
    """The same of processor cores."""
    trained_hours: float = 0.0
    """Part of `gpu_hours`, or of `core_hours` without GPUs, in steps whose work was kept."""
    cost: float | None = None
    """Price of these hours by `DASKPYTORCH_PRICE`. None without prices, or if a GPU has no price."""

    @property
    def share(self) -> float:
        """The goodput: `stepping` as a share of `total`, from 0 to 1."""
        return self.stepping / self.total if self.total else 0.0

    def as_dict(self) -> dict[str, float]:
        """Return the seconds by field name, `total` first."""
        return {name: value for name, value in asdict(self).items() if name not in BILL}

    @property
    def bill(self) -> dict[str, float]:
        """Hours of GPUs, else of cores, the share of them that trained, and the cost if known."""
        hours, name = (self.gpu_hours, "gpu_hours") if self.gpu_hours else (self.core_hours, "core_hours")
        named = {name: hours, "trained_share": self.trained_hours / hours} if hours else {}
        return named if self.cost is None else named | {"cost": self.cost}

    def __str__(self) -> str:
        others = {name: value for name, value in self.as_dict().items() if name not in ("total", "stepping")}
        rest = ", ".join(f"{name} {value:.1f} s" for name, value in others.items() if value >= 0.05)
        whole = f"goodput {100 * self.share:.0f} %: {self.stepping:.1f} s of {self.total:.1f} s stepping"
        cost = [f"cost {self.cost:.2f}"] if self.cost is not None else []
        return "; ".join(filter(None, (whole, rest, *cost)))


@dataclass(frozen=True, kw_only=True)
class RankUsage:
    """A rank's use of its machine, and its work so far, as `Observer.on_usage` receives them.

    Examples:
        >>> from flytekitplugins.daskpytorch import Observer, RankUsage
        >>> class Memory(Observer):
        ...     def on_usage(self, usage: RankUsage) -> None:
        ...         print(f"rank {usage.rank}: {usage.memory / 2**30:.1f} GiB, {usage.cpu:.1f} cores")
        >>> of_gpu = {"gpu_memory": None, "gpu_utilization": None}
        >>> Memory().on_usage(RankUsage(rank=1, time=0.0, num_steps=8, seconds={}, cpu=0.9, memory=3 * 2**30, **of_gpu))
        rank 1: 3.0 GiB, 0.9 cores
    """

    rank: int
    """Number of the rank, from 0."""
    time: float
    """Seconds since the epoch, on the rank's clock."""
    num_steps: int
    """Number of optimizer steps in this attempt so far."""
    seconds: Mapping[str, float]
    """Seconds of the main thread in this attempt since the ranks met, by field of `Goodput`: `preparing`, `stepping`,
    `data`, `compiling`, `evaluation`, `saving`, `waiting`."""
    cpu: float
    """Processor cores that the rank's process keeps busy, on average since the rank's previous report."""
    memory: int
    """Main memory of the rank's process, in bytes."""
    gpu_memory: int | None
    """Memory in use on the rank's own GPU, by all processes, in bytes. None if the rank has not used a GPU, or its
    vendor's library gives no figure."""
    gpu_utilization: float | None
    """Utilisation of the rank's GPU from 0 to 1, as the GPU's driver counts. None if the rank has not used a GPU, or
    its vendor's library gives no figure."""


def numbers(metrics: Mapping[str, Any] | None, *, call: str = "save(metrics=") -> dict[str, float]:
    """Return the metrics of a checkpoint, numbers and one-element tensors, as floats by name.

    Args:
        metrics: None: no metrics.
        call: Text before the metrics in an error's message.

    Raises:
        TypeError: `metrics` is no dictionary of names and numbers.
    """
    if not isinstance(metrics, Mapping | None):
        raise TypeError(f"{call}{reprlib.repr(metrics)}): must be a dictionary of names and numbers")
    plain = {name: _plain(value) for name, value in (metrics or {}).items()}
    for name, value in plain.items():
        if not isinstance(name, str) or not isinstance(value, (int, float)):
            raise TypeError(
                f"{call}{{{reprlib.repr(name)}: {reprlib.repr(value)}}}): must be a name and a number, or a tensor "
                "that holds one"
            )
    return {name: float(value) for name, value in plain.items()}


def _plain(value: Any) -> Any:
    """Return the Python number of a one-element tensor, array or NumPy scalar. Return other values unchanged.

    Whole numbers too large for a float become infinite, as trackers can neither draw nor print these numbers.
    """
    num_elements = value.numel() if hasattr(value, "numel") else getattr(value, "size", None)
    if num_elements == 1 and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        return math.inf if value > 0 else -math.inf
    for kind, exact in PLAIN.items():
        if isinstance(value, kind):
            return exact(value)
    return value
