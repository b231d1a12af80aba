"""Figures of running gangs for operators, which Prometheus and OpenTelemetry export. Runs in the driver."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import get_args

from flytekitplugins.daskpytorch.errors import Kind
from flytekitplugins.daskpytorch.protocol.observer import Observer, Shape, Training
from flytekitplugins.daskpytorch.records import Goodput, LogRecord, RankUsage

MAX_METRICS = 200
"""Maximum number of the user's metrics that a gang exports, so that names made at run time cannot fill a database."""
MAX_RANKS = 100
"""Maximum number of ranks whose use of their machines a gang exports."""
PREFIX = "daskpytorch"
"""Start of all exported names."""
LABELS = ("training", "model")
"""Labels of all figures: name of the task or function, and the model's index in its sweep, empty outside of sweeps."""
RESTART_KINDS = tuple(kind for kind in get_args(Kind) if kind != "closed")
"""Kinds of failures after which a gang may restart."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Definition of an exported figure."""

    name: str
    """Name without prefix and unit, of words with `_` between."""
    help: str
    unit: str = ""
    """Name of the unit, such as `seconds`. Empty for counts."""
    label: str | None = None
    """Label that the figure has in addition to `LABELS`."""
    is_counter: bool = False
    """True if the figure counts events from the gang's start."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of all labels of the figure."""
        return LABELS if self.label is None else (*LABELS, self.label)


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
        Figure(name="forming", help="Duration of the newest start, until all ranks have met.", unit="seconds"),
        Figure(name="goodput", help="Time of the gang by its use.", unit="seconds", label="use"),
        Figure(name="checkpoints", help="Checkpoints that the gang has made safe.", is_counter=True),
        Figure(name="checkpoint_step", help="Step of the newest checkpoint that is safe."),
        Figure(
            name="checkpoint_timestamp",
            help="Time of the newest safe checkpoint since 1970, or of the start from an earlier run's checkpoint.",
            unit="seconds",
        ),
        Figure(name="rank_steps", help="Optimizer steps of a rank in this attempt.", label="rank"),
        Figure(name="rank_cpu_cores", help="Processor cores that a rank keeps busy.", label="rank"),
        Figure(name="rank_memory", help="Main memory of a rank.", unit="bytes", label="rank"),
        Figure(name="rank_gpu_memory", help="Memory in use on a rank's GPU.", unit="bytes", label="rank"),
        Figure(name="rank_gpu_utilization", help="Use of a rank's GPU, from 0 to 1.", unit="ratio", label="rank"),
    )
}
"""Exported figures by name."""
Sample = tuple[tuple[str, ...], float]
"""Values of a figure's labels, and the figure's value."""


class GangFigures(Observer):
    """Observer that holds the newest figures of one gang. Other threads read them by `samples`."""

    def __init__(self) -> None:
        self.labels: tuple[str, ...] = ("", "")
        """Values of `LABELS`."""
        self._values: dict[tuple[str, str], float] = {}
        """Value of each figure, by the figure's name and its own label."""
        self._metrics: set[str] = set()

    def begins(self, training: Training) -> None:
        """Note the gang's labels. Counters begin at 0, since a counter that appears with 1 shows no increase."""
        self.labels = (training.name, "" if training.index is None else str(training.index))
        self._set("running", 1)
        self._set("checkpoints", 0)
        for kind in RESTART_KINDS:
            self._set("restarts", 0, kind)

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

    def samples(self, wanted: str) -> Iterator[Sample]:
        """Yield the values of a figure that are known now."""
        for (name, label), value in self._values.copy().items():
            if name == wanted:
                yield (*self.labels, label) if FIGURES[name].label is not None else self.labels, value

    def _set(self, name: str, value: float, label: str = "") -> None:
        self._values[name, label] = value

    def _count(self, name: str, label: str = "") -> None:
        self._set(name, self._values.get((name, label), 0) + 1, label)

    def _forget_ranks(self) -> None:
        self._values = {key: value for key, value in self._values.items() if not key[0].startswith("rank_")}


def newest(gangs: Iterable[GangFigures]) -> Iterable[GangFigures]:
    """Return the newest gang of each training and model, since two samples with the same labels are an error."""
    return {gang.labels: gang for gang in list(gangs)}.values()
