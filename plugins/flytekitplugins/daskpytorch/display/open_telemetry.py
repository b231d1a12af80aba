"""OpenTelemetry: figures of running gangs as instruments of the process's meter provider. Runs in the driver."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, get_args

from flytekitplugins.daskpytorch import checks
from flytekitplugins.daskpytorch.display.run_state import RunState, View
from flytekitplugins.daskpytorch.errors import Kind
from flytekitplugins.daskpytorch.protocol.journal import Training

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider, Observation

MAX_RANKS = 100
SHOWN_AFTER_END = 120.0
"""Seconds for which an ended gang's figures are exported. An SDK exports every 60 s unless told otherwise."""
RESTART_KINDS = tuple(kind for kind in get_args(Kind) if kind != "closed")


@dataclass(frozen=True)
class Figure:
    name: str
    help: str
    value: Callable[[RunState], Any]
    """A number, numbers by label, or None."""
    _: KW_ONLY
    unit: str = ""
    """UCUM code."""
    label: str | None = None
    is_counter: bool = False


def _rank_steps(run: RunState) -> dict[str, float]:
    usages = list(run.usages.values()) if run.end is None else []
    return {str(usage.rank): usage.num_steps for usage in usages if usage.rank < MAX_RANKS}


def _uses_of_time(run: RunState) -> dict[str, float]:
    seconds = run.goodput.as_dict() if run.goodput is not None else {}
    return {use: seconds[use] for use in seconds if use != "total"}


def _restarts(run: RunState) -> dict[str, float]:
    return {kind: run.failures[kind] for kind in RESTART_KINDS}  # a first 1 shows no increase


BILL = "Hours of GPUs, else of cores, the share of them that trained, and their price, over all attempts."
CHECKPOINT_TIME = "Time of the newest safe checkpoint since 1970, or of the start from an earlier run's checkpoint."
FIGURES = (
    Figure("running", "1 while the gang runs, 0 after its end.", lambda run: run.end is None),
    Figure("ranks", "Number of ranks of the gang.", lambda run: run.shape and run.shape.world_size),
    Figure("nodes", "Number of Dask workers, or 1 on one node.", lambda run: run.shape and len(run.shape.nodes)),
    Figure("step", "Step of rank 0's newest log record.", lambda run: run.values.record and run.values.record.step),
    Figure("steps", "Total number of steps, if logged.", lambda run: run.values.record and run.values.record.num_steps),
    Figure("metric", "Newest value of each metric that rank 0 logs.", lambda run: run.values.numbers, label="metric"),
    Figure("restarts", "Restarts of the gang by kind of failure.", _restarts, label="kind", is_counter=True),
    Figure("forming", "Duration of the newest start, until all ranks have met.", lambda run: run.forming, unit="s"),
    Figure("goodput", "Time of the gang by its use.", _uses_of_time, unit="s", label="use"),
    Figure("bill", BILL, lambda run: run.goodput and run.goodput.bill, label="of"),
    Figure("checkpoints", "Checkpoints that the gang has made safe.", lambda run: run.num_checkpoints, is_counter=True),
    Figure("checkpoint_step", "Step of the newest safe checkpoint.", lambda run: run.checkpoint and run.checkpoint[0]),
    Figure("checkpoint_timestamp", CHECKPOINT_TIME, lambda run: run.checkpoint and run.checkpoint[1], unit="s"),
    Figure("rank_steps", "Optimizer steps of a rank in this attempt.", _rank_steps, label="rank"),
)


@dataclass(frozen=True, kw_only=True)
class OpenTelemetry:
    """Figures of the gang for OpenTelemetry, with names such as `daskpytorch.step`.

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
    def on_begin(self, training: Training) -> None:
        self.attributes = {"training": training.name, "model": "" if training.index is None else str(training.index)}
        _export(self)

    @property
    def is_shown(self) -> bool:
        return self.state.ended_at is None or time.time() - self.state.ended_at < SHOWN_AFTER_END

    def samples(self, figure: Figure) -> Iterator[tuple[dict[str, str], float]]:
        found = figure.value(self.state)
        for label, value in found.items() if isinstance(found, Mapping) else [(None, found)]:
            if value is not None:
                yield {**self.attributes, **({figure.label: label} if figure.label and label else {})}, float(value)


# ---- The process's instruments --------------------------------------------------------------------------------------


_gangs: list[GangFigures] = []
_lock = threading.Lock()


@functools.cache  # instruments cannot be removed, so gangs share them
def _make_instruments(provider: MeterProvider) -> None:
    meter = provider.get_meter("flytekitplugins.daskpytorch")
    for figure in FIGURES:
        make = meter.create_observable_counter if figure.is_counter else meter.create_observable_gauge
        make(f"daskpytorch.{figure.name}", [functools.partial(_observe, figure)], figure.unit, figure.help)


def _export(gang: GangFigures) -> None:
    from opentelemetry.metrics import get_meter_provider

    with _lock:
        _make_instruments(get_meter_provider())
        _gangs[:] = [*filter(lambda each: each.is_shown, _gangs), gang]


def _observe(figure: Figure, _: object) -> Iterator[Observation]:
    from opentelemetry.metrics import Observation

    newest = {tuple(gang.attributes.values()): gang for gang in [*_gangs] if gang.is_shown}
    for gang in newest.values():
        for attributes, value in gang.samples(figure):
            yield Observation(value, attributes)
