"""OpenTelemetry: figures of running gangs as instruments of the process's meter provider. Runs in the driver."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from flytekitplugins.daskpytorch.errors import Kind
from flytekitplugins.daskpytorch.extras import require_extra
from flytekitplugins.daskpytorch.protocol.observer import Observer, Shape, Training
from flytekitplugins.daskpytorch.records import Goodput, LogRecord, RankUsage

if TYPE_CHECKING:
    from opentelemetry.metrics import Observation

MAX_METRICS = 200
"""Maximum number of the user's metrics that a gang exports, so that names made at run time cannot fill a database."""
MAX_RANKS = 100
"""Maximum number of ranks whose use of their machines a gang exports."""
PREFIX = "daskpytorch"
"""Start of all exported names."""
SHOWN_AFTER_END = 120.0
"""Time, in seconds, for which an ended gang's figures are exported. An SDK exports every 60 s unless told otherwise."""
RESTART_KINDS = tuple(kind for kind in get_args(Kind) if kind != "closed")
"""Kinds of failures after which a gang may restart."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Definition of an exported figure."""

    name: str
    help: str
    unit: str = ""
    """Unit's code for OpenTelemetry (UCUM). Exporters to Prometheus name every gauge of unit "1" a ratio."""
    label: str | None = None
    """Attribute that the figure has in addition to `training` and `model`."""
    is_counter: bool = False
    """True if the figure counts events from the gang's start."""


FIGURES = {
    figure.name: figure
    for figure in (
        Figure(name="running", help="1 while the gang runs, 0 after its end."),
        Figure(name="ranks", help="Number of ranks of the gang."),
        Figure(name="nodes", help="Number of Dask workers of the gang, or 1 on the task's own node."),
        Figure(name="step", help="Step of rank 0's newest log record."),
        Figure(name="steps", help="Total number of steps, if the training logs the number."),
        Figure(name="metric", help="Newest value of each metric that rank 0 logs.", label="metric"),
        Figure(name="restarts", help="Restarts of the gang by kind of failure.", label="kind", is_counter=True),
        Figure(name="forming", help="Duration of the newest start, until all ranks have met.", unit="s"),
        Figure(name="goodput", help="Time of the gang by its use.", unit="s", label="use"),
        Figure(name="checkpoints", help="Checkpoints that the gang has made safe.", is_counter=True),
        Figure(name="checkpoint_step", help="Step of the newest checkpoint that is safe."),
        Figure(
            name="checkpoint_timestamp",
            help="Time of the newest safe checkpoint since 1970, or of the start from an earlier run's checkpoint.",
            unit="s",
        ),
        Figure(name="rank_steps", help="Optimizer steps of a rank in this attempt.", label="rank"),
        Figure(name="rank_cpu_cores", help="Processor cores that a rank keeps busy.", label="rank"),
        Figure(name="rank_memory", help="Main memory of a rank.", unit="By", label="rank"),
        Figure(name="rank_gpu_memory", help="Memory in use on a rank's GPU.", unit="By", label="rank"),
        Figure(name="rank_gpu_utilization", help="Use of a rank's GPU, from 0 to 1.", unit="1", label="rank"),
    )
}
"""Exported figures by name."""


@dataclass(frozen=True, kw_only=True)
class OpenTelemetry:
    """Figures of the gang for OpenTelemetry, with names such as `daskpytorch.rank_memory`.

    The meter provider of the driver's process gets the figures, about all gangs of the process. The program sets the
    provider by `opentelemetry.metrics.set_meter_provider`, or starts under `opentelemetry-instrument`. Without a
    provider, nothing is exported.

    All figures have the attributes `training`, the name of the task or function, and `model`, the index in a sweep. Of
    a process's gangs with the same attributes, the newest one is exported. The last figures of a gang are exported for
    two minutes after its end, with `daskpytorch.running` at 0.

    Raises:
        ImportError: The extra `opentelemetry` is not installed.

    Examples:
        >>> from flytekitplugins.daskpytorch import DaskDDP, Gang, OpenTelemetry
        >>> config = DaskDDP(gang=Gang(observers=(OpenTelemetry(),)))
    """

    def __post_init__(self) -> None:
        require_extra("opentelemetry", "OpenTelemetry()")

    def __call__(self) -> GangFigures:
        """Return a new observer that exports the figures of one gang."""
        return GangFigures()


class GangFigures(Observer):
    """Observer that holds the newest figures of one gang. The meter provider's threads read them."""

    def __init__(self) -> None:
        self.attributes = {"training": "", "model": ""}
        self._values: dict[tuple[str, str], float] = {}
        """Value of each figure, by the figure's name and its own label."""
        self._metrics: set[str] = set()
        self._ended_at: float | None = None

    def begins(self, training: Training) -> None:
        """Export the figures. Counters begin at 0, since a counter that appears with 1 shows no increase."""
        self.attributes = {"training": training.name, "model": "" if training.index is None else str(training.index)}
        self._set("running", 1)
        self._set("checkpoints", 0)
        for kind in RESTART_KINDS:
            self._set("restarts", 0, kind)
        _export(self)

    def placed(self, shape: Shape) -> None:
        """Note the number of ranks, of which a restart may have other ones."""
        self._forget_ranks()
        self._set("ranks", shape.world_size)
        self._set("nodes", len(shape.nodes))

    def formed(self, seconds: float) -> None:
        """Note the duration of a start."""
        self._set("forming", seconds)

    def logged(self, record: LogRecord) -> None:
        """Note the step and metrics of rank 0."""
        if record.rank != 0:
            return
        if not record.is_evaluation:
            self._set("step", record.step)
        if record.num_steps is not None:
            self._set("steps", record.num_steps)
        for name, value in record.numbers.items():
            if name in self._metrics or len(self._metrics) < MAX_METRICS:
                self._metrics.add(name)
                self._set("metric", value, name)

    def resumed(self, step: int) -> None:
        """Note the checkpoint of an earlier run. Its age counts from now."""
        self._note_checkpoint(step)

    def kept(self, step: int) -> None:
        """Note and count a safe checkpoint."""
        self._note_checkpoint(step)
        self._count("checkpoints")

    def _note_checkpoint(self, step: int) -> None:
        self._set("checkpoint_step", step)
        self._set("checkpoint_timestamp", time.time())

    def used(self, usage: RankUsage) -> None:
        """Note a rank's use of its machine."""
        if usage.rank >= MAX_RANKS:
            return
        self._set("rank_steps", usage.num_steps, str(usage.rank))
        of_machine = {"cpu_cores": usage.cpu, "memory": usage.memory}
        of_gpu = {"gpu_memory": usage.gpu_memory, "gpu_utilization": usage.gpu_utilization}
        for name, value in {**of_machine, **of_gpu}.items():
            if value is not None:
                self._set(f"rank_{name}", value, str(usage.rank))

    def accounted(self, goodput: Goodput) -> None:
        """Note the account of the gang's time."""
        for name, seconds in goodput.as_dict().items():
            if name != "total":
                self._set("goodput", seconds, name)

    def failed(self, kind: str) -> None:
        """Count a restart."""
        self._count("restarts", kind)

    def ended(self, error: Exception | None) -> None:
        """Note the end, after which no rank uses its machine."""
        self._forget_ranks()
        self._set("running", 0)
        self._ended_at = time.monotonic()

    @property
    def is_shown(self) -> bool:
        """True from the gang's start to some time after its end."""
        return self._ended_at is None or time.monotonic() - self._ended_at < SHOWN_AFTER_END

    def samples(self, wanted: str) -> Iterator[tuple[dict[str, str], float]]:
        """Yield attributes and value of a figure, for each value that is known now."""
        name_of_label = FIGURES[wanted].label
        for (name, label), value in self._values.copy().items():
            if name == wanted:
                yield self.attributes if name_of_label is None else {**self.attributes, name_of_label: label}, value

    def _set(self, name: str, value: float, label: str = "") -> None:
        self._values[name, label] = value

    def _count(self, name: str, label: str = "") -> None:
        self._set(name, self._values.get((name, label), 0) + 1, label)

    def _forget_ranks(self) -> None:
        self._values = {key: value for key, value in self._values.items() if not key[0].startswith("rank_")}


# ---- The process's instruments --------------------------------------------------------------------------------------


_gangs: list[GangFigures] = []
"""Gangs of this process whose figures are exported, the oldest first."""
_providers: list[Any] = []
"""Meter providers that have the instruments. Instruments cannot be removed, so gangs share them."""
_lock = threading.Lock()


def _export(gang: GangFigures) -> None:
    from opentelemetry.metrics import get_meter_provider

    with _lock:
        if (provider := get_meter_provider()) not in _providers:
            _providers.append(provider)
            _make_instruments(provider)
        _gangs[:] = [*filter(lambda each: each.is_shown, _gangs), gang]


def _make_instruments(provider: Any) -> None:
    meter = provider.get_meter("flytekitplugins.daskpytorch")
    for name, figure in FIGURES.items():
        make = meter.create_observable_counter if figure.is_counter else meter.create_observable_gauge
        make(f"{PREFIX}.{name}", [partial(_observe, name)], figure.unit, figure.help)


def _observe(name: str, _: object) -> Iterator[Observation]:
    from opentelemetry.metrics import Observation

    newest = {tuple(gang.attributes.values()): gang for gang in [*_gangs] if gang.is_shown}
    for gang in newest.values():
        for attributes, value in gang.samples(name):
            yield Observation(value, attributes)
