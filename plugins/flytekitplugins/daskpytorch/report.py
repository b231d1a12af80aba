"""Charts and tables as HTML, for Decks: for tasks and workflows to use, too."""

import io
import operator
from collections.abc import Iterable, Sequence
from html import escape

from flytekitplugins.daskpytorch.process.streams import one_line

__all__ = ["Curve", "line_chart", "table"]

MAX_POINTS = 2_000
"""Of a curve; longer ones are thinned."""
MARKED_POINTS = 50
"""Curves up to this long show their points."""
MAX_NAME = 60
"""Characters of a metric's name that are shown."""
Point = tuple[int, float, float]
"""Step, x and y."""


class Curve:
    """A metric over the training, in a bounded number of points, however many there were.

    By min-max decimation, as audio editors draw waves: of so many successive points the lowest and the highest are
    kept, so that no spike is lost; when there are too many such buckets, each two become one.
    """

    def __init__(self) -> None:
        self._buckets: list[list[Point]] = []
        self._size = 1
        """Points that go into a bucket."""
        self._room = 0
        """How many more go into the last one."""

    def add(self, point: Point) -> None:
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


def _extremes(points: list[Point]) -> list[Point]:
    """The lowest and the highest, in the order in which they came: of equal ones the first and the last."""
    if len(points) < 3:
        return points
    lowest = min(points, key=_y_of)
    highest = max(reversed(points), key=_y_of)
    return [point for point in points if point is lowest or point is highest]


_y_of = operator.itemgetter(2)


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
    curve = Curve()
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
