"""The Deck of a training: charts of what rank 0 logged, the gang, its timings. Runs in the driver."""

from __future__ import annotations

import io
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape

from flytekitplugins.daskpytorch.context import LogRecord
from flytekitplugins.daskpytorch.observer import Observer, Shape

__all__ = ["Recorder", "line_chart", "table"]

UNCHARTED = {"epoch", "samples_seen"}
MAX_POINTS = 2_000
"""Points of a curve; longer ones are thinned evenly."""
MARKED_POINTS = 50
"""Curves up to this long show their points."""


class Recorder(Observer):
    """Keeps what happened, for the Deck."""

    def __init__(self) -> None:
        self.shape: Shape | None = None
        self.records: list[LogRecord] = []
        self.error: Exception | None = None
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
        """Keep every rank's values."""
        self.records.append(record)

    def restarting(self, reason: str, step: int | None) -> None:
        """Keep the reason, and drop what will be logged again."""
        self.records = [record for record in self.records if step is not None and record.step <= step]
        self._timings.append((f"started again: {reason}", time.monotonic() - self._began_at))

    def ended(self, error: Exception | None) -> None:
        """Keep the outcome."""
        self.error = error
        self._timings.append(("ended", time.monotonic() - self._began_at))

    def html(self) -> str:
        """The Deck's body."""
        parts = []
        if self.error is not None:
            parts.append(f"<h3>Failed</h3><pre>{escape(str(self.error.__cause__ or self.error))}</pre>")
        parts += [line_chart(names, curves, x_label) for names, curves, x_label in self._charts()]
        if self.shape is not None:
            parts.append("<h3>Gang</h3>" + _gang_table(self.shape))
        parts.append("<h3>Timings</h3>" + table(("until", "seconds"), [(n, f"{s:.2f}") for n, s in self._timings]))
        return "\n".join(parts)

    def _charts(self) -> Iterable[tuple[str, dict[str, list[tuple[float, float]]], str]]:
        """Title, curves and x-axis of each chart; `loss` and `held_out_loss` share one, and the like."""
        main = [record for record in self.records if record.rank == 0]
        per_epoch = [r for r in main if "epoch" in r.numbers and any(n.startswith("held_out") for n in r.numbers)]
        chosen, x_label = (per_epoch, "epoch") if per_epoch else (main, "step")
        curves: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
        for record in chosen:
            x = record.numbers["epoch"] if per_epoch else float(record.step)
            for name, value in record.numbers.items():
                if name not in UNCHARTED:
                    curves[name.removeprefix("held_out_")][name].append((x, value))
        for title, named in curves.items():
            yield title.replace("_", " "), dict(named), x_label


def line_chart(title: str, curves: dict[str, list[tuple[float, float]]], x_label: str) -> str:
    """A chart as inline SVG: for each name its (x, y) points."""
    from matplotlib.figure import Figure  # not pyplot, which keeps global state
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.subplots()
    for name, points in curves.items():
        thinned = points[:: max(1, len(points) // MAX_POINTS)]
        axes.plot(*zip(*thinned, strict=True), marker="o" if len(thinned) <= MARKED_POINTS else "", label=name)
    axes.set_title(title)
    axes.set_xlabel(x_label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    svg = io.StringIO()
    figure.savefig(svg, format="svg")
    return svg.getvalue()[svg.getvalue().index("<svg") :]


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """An HTML table; everything in it is escaped."""
    head = "".join(f"<th style='text-align:left;padding-right:1.5em'>{escape(name)}</th>" for name in header)
    body = "".join(
        "<tr>" + "".join(f"<td style='padding-right:1.5em'>{escape(str(cell))}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _gang_table(shape: Shape) -> str:
    rows = [
        (
            place.rank,
            place.local_rank,
            node.host,
            node.worker,
            _device(node.gpus, node.gpu_names, place.gpu),
            place.num_threads,
        )
        for node, places in zip(shape.nodes, shape.places, strict=True)
        for place in places
    ]
    header = ("rank", "local_rank", "host", "worker", "device", "threads")
    return f"<p>{shape.world_size} ranks, backend {escape(shape.backend)}</p>" + table(header, rows)


def _device(gpus: Sequence[str], names: Sequence[str], gpu: str | None) -> str:
    return "CPU" if gpu is None else f"{names[gpus.index(gpu)]} (GPU {gpu})"
