"""OpenTelemetry: figures of running gangs as instruments of the process's meter provider. Runs in the driver."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from flytekitplugins.daskpytorch import checks
from flytekitplugins.daskpytorch.display.run_state import RunState, View
from flytekitplugins.daskpytorch.errors import Kind
from flytekitplugins.daskpytorch.protocol.journal import Training

if TYPE_CHECKING:
    from opentelemetry.metrics import Observation

MAX_METRICS = 200
"""Exported metrics of the user: names made at run time cannot fill a database."""
MAX_RANKS = 100
SHOWN_AFTER_END = 120.0
"""Seconds for which an ended gang's figures are exported. An SDK exports every 60 s unless told otherwise."""
RESTART_KINDS = tuple(kind for kind in get_args(Kind) if kind != "closed")


@dataclass(frozen=True, kw_only=True)
class Figure:
    name: str
    help: str
    unit: str = ""
    """UCUM code. Exporters to Prometheus name every gauge of unit "1" a ratio."""
    label: str | None = None
    """Attribute in addition to `training` and `model`."""
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


def values_of(run: RunState) -> dict[str, dict[str, float]]:
    """Return the known values of the figures by name, and by the figure's own label ("" without one)."""
    shape, values = run.shape, {"running": {"": float(run.end is None)}}

    def add(name: str, value: float | None, label: str = "") -> None:
        if value is not None:
            values.setdefault(name, {})[label] = float(value)

    if shape is not None:
        add("ranks", shape.world_size)
        add("nodes", len(shape.nodes))
    if (last := run.last) is not None:
        add("step", last.step)
        add("steps", last.num_steps)
    numbers = ((name, value) for name, value in run.newest.items() if isinstance(value, (int, float)))
    values["metric"] = {name: float(value) for name, value in itertools.islice(numbers, MAX_METRICS)}
    values["restarts"] = {kind: float(run.failures[kind]) for kind in RESTART_KINDS}  # a first 1 shows no increase
    add("forming", run.forming)
    if run.goodput is not None:
        values["goodput"] = {use: seconds for use, seconds in run.goodput.as_dict().items() if use != "total"}
    add("checkpoints", run.num_checkpoints)
    if run.checkpoint is not None:
        add("checkpoint_step", run.checkpoint[0])
        add("checkpoint_timestamp", run.checkpoint[1])
    for usage in list(run.usages.values()) if run.end is None else ():
        if (rank := usage.rank) < MAX_RANKS:
            add("rank_steps", usage.num_steps, str(rank))
            add("rank_cpu_cores", usage.cpu, str(rank))
            add("rank_memory", usage.memory, str(rank))
            add("rank_gpu_memory", usage.gpu_memory, str(rank))
            add("rank_gpu_utilization", usage.gpu_utilization, str(rank))
    return values


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
        checks.require_extra("opentelemetry", "OpenTelemetry()")

    def __call__(self) -> GangFigures:
        return GangFigures()


class GangFigures(View):
    def __init__(self) -> None:
        self.state = RunState()

    def on_begin(self, training: Training) -> None:
        self.attributes = {"training": training.name, "model": "" if training.index is None else str(training.index)}
        _export(self)

    @property
    def is_shown(self) -> bool:
        return self.state.ended_at is None or time.time() - self.state.ended_at < SHOWN_AFTER_END

    def samples(self, name: str) -> Iterator[tuple[dict[str, str], float]]:
        own = FIGURES[name].label
        for label, value in values_of(self.state).get(name, {}).items():
            yield self.attributes if own is None else {**self.attributes, own: label}, value


# ---- The process's instruments --------------------------------------------------------------------------------------


_gangs: list[GangFigures] = []
"""Exported, oldest first."""
_providers: list[Any] = []
"""Providers that have the instruments, which cannot be removed, so gangs share them."""
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
        make(f"daskpytorch.{name}", [partial(_observe, name)], figure.unit, figure.help)


def _observe(name: str, _: object) -> Iterator[Observation]:
    from opentelemetry.metrics import Observation

    newest = {tuple(gang.attributes.values()): gang for gang in [*_gangs] if gang.is_shown}
    for gang in newest.values():
        for attributes, value in gang.samples(name):
            yield Observation(value, attributes)
