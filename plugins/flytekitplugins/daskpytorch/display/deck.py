"""The Deck of a training: charts of what rank 0 logged, the gang, its timings. Runs in the driver."""

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from flytekitplugins.daskpytorch.context import LogRecord, SavedCheckpoint
from flytekitplugins.daskpytorch.protocol.observer import Observer, Shape
from flytekitplugins.daskpytorch.protocol.placement import Node, Place
from flytekitplugins.daskpytorch.report import Curve, line_chart, table

__all__ = ["Recorder"]

HELD_OUT = "held_out"
"""Begins the names of metrics of data that nothing was learnt from."""
UNCHARTED = {"epoch", "samples_seen"}
MAX_CURVES = 50
"""Metrics that are drawn; each takes memory, and a tenth of a second to draw."""
MAX_VALUE = 1e200
"""What is beyond cannot be drawn."""


class Recorder(Observer):
    """Keeps what happened, as far as the Deck shows it: of the records rank 0's, and of these what is drawn."""

    def __init__(self) -> None:
        self.shape: Shape | None = None
        self._by_step: dict[str, Curve] = {}
        self._by_epoch: dict[str, Curve] = {}
        """Of the records that sum up an epoch; drawn in place of the others where there are any."""
        self._is_crowded = False
        self.error: Exception | None = None
        self._checkpoints: Sequence[SavedCheckpoint] = ()
        self._began_at = time.monotonic()
        self._timings: list[tuple[str, float]] = []

    def placed(self, shape: Shape) -> None:
        """Keep the gang's shape."""
        self.shape = shape
        self._timings.append(("workers ready", time.monotonic() - self._began_at))

    def formed(self, seconds: float) -> None:
        """Keep the time of the rendezvous."""
        self._timings.append(("ranks have met", time.monotonic() - self._began_at))

    def logged(self, record: LogRecord) -> None:
        """Keep rank 0's values."""
        if record.rank != 0:
            return
        numbers = record.numbers
        self._take(self._by_step, record.step, float(record.step), numbers)
        if "epoch" in numbers and any(name.startswith(HELD_OUT) for name in numbers):
            self._take(self._by_epoch, record.step, numbers["epoch"], numbers)

    def restarting(self, reason: str, step: int | None) -> None:
        """Keep the reason, and drop what will be logged again."""
        for curves in (self._by_step, self._by_epoch):
            for name, curve in list(curves.items()):
                if step is not None:
                    curve.cut(step)
                if step is None or not curve.points:
                    del curves[name]
        self._timings.append((f"started again: {reason}", time.monotonic() - self._began_at))

    def keeps(self, checkpoints: Sequence[SavedCheckpoint]) -> None:
        """Keep which they are."""
        self._checkpoints = checkpoints

    def ended(self, error: Exception | None) -> None:
        """Keep the outcome."""
        self.error = error
        self._timings.append(("ended", time.monotonic() - self._began_at))

    def html(self) -> str:
        """The Deck's body."""
        parts = []
        if self.error is not None:
            parts.append(f"<h3>Failed</h3><pre>{escape(str(self.error.__cause__ or self.error))}</pre>")
        parts += [line_chart(title, curves, x_label) for title, curves, x_label in self._charts()]
        if self._is_crowded:
            parts.append(f"<p>Only the first {MAX_CURVES} metrics are drawn.</p>")
        if self.shape is not None:
            parts.append("<h3>Gang</h3>" + _gang_table(self.shape))
        if self._checkpoints:
            parts.append("<h3>Checkpoints</h3>" + _checkpoint_table(self._checkpoints))
        parts.append("<h3>Timings</h3>" + table(("until", "seconds"), [(n, f"{s:.2f}") for n, s in self._timings]))
        return "\n".join(parts).encode(errors="replace").decode()  # an error's text may have what no file can take

    def _take(self, curves: dict[str, Curve], step: int, x: float, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            if name in UNCHARTED or not (abs(x) <= MAX_VALUE and abs(value) <= MAX_VALUE):
                continue
            if name not in curves and len(curves) == MAX_CURVES:
                self._is_crowded = True
            else:
                curves.setdefault(name, Curve()).add((step, x, value))

    def _charts(self) -> Iterable[tuple[str, dict[str, list[tuple[float, float]]], str]]:
        """Title, curves and x-axis of each chart; `loss` and `held_out_loss` share one, and the like."""
        chosen, x_label = (self._by_epoch, "epoch") if self._by_epoch else (self._by_step, "step")
        charts: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(dict)
        for name, curve in chosen.items():
            charts[name.removeprefix(f"{HELD_OUT}_")][name] = curve.points
        for title, curves in charts.items():
            yield title.replace("_", " "), curves, x_label


def _gang_table(shape: Shape) -> str:
    rows = [
        (place.rank, place.local_rank, node.host, node.worker, _device(node, place), place.num_threads)
        for node, places in zip(shape.nodes, shape.places, strict=True)
        for place in places
    ]
    header = ("rank", "local_rank", "host", "worker", "device", "threads")
    return f"<p>{shape.world_size} ranks, backend {escape(shape.backend)}</p>" + table(header, rows)


def _checkpoint_table(checkpoints: Sequence[SavedCheckpoint]) -> str:
    rows = [
        (
            each.step,
            ", ".join(f"{name} {value:g}" for name, value in each.metrics.items()),
            f"{each.size:,}",
            each.place or "the driver's disk",
        )
        for each in checkpoints
    ]
    return table(("step", "metrics", "bytes", "place"), rows)


def _device(node: Node, place: Place) -> str:
    return "CPU" if place.gpu is None else f"{node.gpu_names[node.gpus.index(place.gpu)]} (GPU {place.gpu})"
