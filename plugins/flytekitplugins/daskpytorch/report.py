"""The Deck of a training: charts of what rank 0 logged, the gang, its timings. Runs in the driver."""

from __future__ import annotations

import io
import operator
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from flytekitplugins.daskpytorch.context import LogRecord
from flytekitplugins.daskpytorch.process.screen import one_line
from flytekitplugins.daskpytorch.protocol.observer import Observer, Shape

__all__ = ["Recorder", "line_chart", "table"]

HELD_OUT = "held_out"
"""Begins the names of metrics of data that nothing was learnt from."""
UNCHARTED = {"epoch", "samples_seen"}
MAX_POINTS = 2_000
"""Of a curve; longer ones are thinned."""
MARKED_POINTS = 50
"""Curves up to this long show their points."""
MAX_CURVES = 50
"""Metrics that are drawn; each takes memory, and a tenth of a second to draw."""
MAX_NAME = 60
"""Characters of a metric's name that are shown."""
MAX_VALUE = 1e200
"""What is beyond cannot be drawn."""

_Point = tuple[int, float, float]
"""Step, x and y."""


class _Curve:
    """A metric over the training, in a bounded number of points, however many there were.

    By min-max decimation, as audio editors draw waves: of so many successive points the lowest and the highest are
    kept, so that no spike is lost; when there are too many such buckets, each two become one.
    """

    def __init__(self) -> None:
        self._buckets: list[list[_Point]] = []
        self._size = 1
        """Points that go into a bucket."""
        self._room = 0
        """How many more go into the last one."""

    def add(self, point: _Point) -> None:
        """Take in the next point."""
        if self._room == 0:
            if len(self._buckets) >= MAX_POINTS // 2:
                self._halve()
            self._buckets.append([])
            self._room = self._size
        self._room -= 1
        bucket = self._buckets[-1]
        if len(bucket) < 2 or not (bucket[0][2] < point[2] < bucket[1][2] or bucket[1][2] < point[2] < bucket[0][2]):
            self._buckets[-1] = _extremes([*bucket, point])

    def cut(self, step: int) -> None:
        """Forget the points of later steps."""
        self._buckets = [kept for bucket in self._buckets if (kept := [point for point in bucket if point[0] <= step])]
        self._room = 0

    @property
    def points(self) -> list[tuple[float, float]]:
        """The x and y of what was kept, in order."""
        return [(x, y) for bucket in self._buckets for _, x, y in bucket]

    def _halve(self) -> None:
        pairs = zip(self._buckets[::2], self._buckets[1::2], strict=True)
        self._buckets = [_extremes([*first, *second]) for first, second in pairs]
        self._size *= 2


def _extremes(points: list[_Point]) -> list[_Point]:
    """The lowest and the highest, in the order in which they came: of equal ones the first and the last."""
    if len(points) < 3:
        return points
    lowest = min(points, key=_y_of)
    highest = max(reversed(points), key=_y_of)
    return [point for point in points if point is lowest or point is highest]


_y_of = operator.itemgetter(2)


class Recorder(Observer):
    """Keeps what happened, as far as the Deck shows it: of the records rank 0's, and of these what is drawn."""

    def __init__(self) -> None:
        self.shape: Shape | None = None
        self._by_step: dict[str, _Curve] = {}
        self._by_epoch: dict[str, _Curve] = {}
        """Of the records that sum up an epoch; drawn in place of the others where there are any."""
        self._is_crowded = False
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
        parts.append("<h3>Timings</h3>" + table(("until", "seconds"), [(n, f"{s:.2f}") for n, s in self._timings]))
        return "\n".join(parts).encode(errors="replace").decode()  # an error's text may have what no file can take

    def _take(self, curves: dict[str, _Curve], step: int, x: float, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            if name in UNCHARTED or not (abs(x) <= MAX_VALUE and abs(value) <= MAX_VALUE):
                continue
            if name not in curves and len(curves) == MAX_CURVES:
                self._is_crowded = True
            else:
                curves.setdefault(name, _Curve()).add((step, x, value))

    def _charts(self) -> Iterable[tuple[str, dict[str, list[tuple[float, float]]], str]]:
        """Title, curves and x-axis of each chart; `loss` and `held_out_loss` share one, and the like."""
        chosen, x_label = (self._by_epoch, "epoch") if self._by_epoch else (self._by_step, "step")
        charts: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(dict)
        for name, curve in chosen.items():
            charts[name.removeprefix(f"{HELD_OUT}_")][name] = curve.points
        for title, curves in charts.items():
            yield title.replace("_", " "), curves, x_label


def line_chart(title: str, curves: dict[str, list[tuple[float, float]]], x_label: str) -> str:
    """A chart as inline SVG: for each name its (x, y) points."""
    from matplotlib.figure import Figure  # not pyplot, which keeps global state
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.subplots()
    for points in map(_thinned, curves.values()):
        axes.plot(*zip(*points, strict=True), marker="o" if len(points) <= MARKED_POINTS else "")
    axes.set_title(one_line(title, MAX_NAME), parse_math=False)
    axes.set_xlabel(x_label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=True, alpha=0.3)
    legend = axes.legend(axes.lines, ["-"] * len(curves))
    for text, name in zip(legend.get_texts(), curves, strict=True):  # a name is no formula, and may begin with "_"
        text.set(text=one_line(name, MAX_NAME), parse_math=False)
    svg = io.StringIO()
    figure.savefig(svg, format="svg")
    return svg.getvalue()[svg.getvalue().index("<svg") :]


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    if len(points) <= MAX_POINTS:
        return points
    curve = _Curve()
    for x, y in points:
        curve.add((0, x, y))
    return curve.points


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
