"""Line charts over steps, epochs or seconds, curves with a bounded number of points, and tables of events.

uPlot draws the charts in the reader's browser.
"""

import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from flytekitplugins.daskpytorch.process.streams import one_line
from flytekitplugins.daskpytorch.report.pieces import LARGE, NUM_COLOURS, Tone, cells_table, element, name_of, text_of

__all__ = ["Curve", "Event", "duration", "line_chart", "timeline"]

MAX_VALUE = 1e200
WIDE_RANGE = 100.0
"""Largest to smallest value, above which a chart first has a logarithmic axis."""
MAX_MARKS = 100
MAX_POINTS = 2_000
Point = tuple[float, float]
Points = list[Point]
MAX_TEXT = 300
MAX_DETAIL = 1_000
MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0


def line_chart(
    title: str,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    x_label: str,
    *,
    best: Mapping[str, Literal["min", "max"]] | None = None,
    marks: Sequence[tuple[float, str]] = (),
    dashed: Iterable[str] = (),
    from_zero: bool = False,
    max_points: int | None = None,
) -> str:
    """Return a line chart as HTML, with newest and best values.

    In the browser, readers see values under the pointer, and hide lines by a click on their names. A marked part is
    enlarged until a double click. If all values are positive, readers can choose a logarithmic scale. A chart begins
    with that scale if the largest value is over 100 times the smallest.

    Args:
        title: Title above the chart, followed by `x_label`.
        curves: Points (x, y) of each line by name, with ascending x. Values other than finite numbers are left out.
        x_label: Name of the x axis, for example "step".
        best: Lines with a ring at their lowest ("min") or highest ("max") point.
        marks: Vertical lines: x and a text for each.
        dashed: Names of dashed lines, for example a baseline.
        from_zero: True for a linear axis that begins at 0.
        max_points: Maximum number of points of a line. Longer lines are thinned, but keep their spikes. None: 2,000.

    Examples:
        >>> from flytekitplugins.daskpytorch import report
        >>> curves = {"training": [(1, 2.31), (2, 1.10)], "held out": [(1, 2.40), (2, 1.32)]}
        >>> html = report.line_chart("loss", curves, "epoch", best={"held out": "min"}, marks=[(1.5, "restart")])
    """
    drawn = {name: thinned(_finite(points), max_points) for name, points in curves.items()}
    chosen = {name: best_of(drawn[name], mode) for name, mode in (best or {}).items() if drawn.get(name)}
    values = [y for points in drawn.values() for _, y in points]
    is_positive = bool(values) and min(values) > 0 and not from_zero
    data = {
        "title": name_of(title),
        "x_label": x_label,
        "log": is_positive and max(values) > WIDE_RANGE * min(values),
        "positive": is_positive,
        "whole": all(float(x).is_integer() for points in drawn.values() for x, _ in points),
        "from_zero": from_zero,
        "marks": [{"x": x, "text": words} for x, words in marks[-MAX_MARKS:]],
        "lines": [
            {
                "name": name_of(name),
                "colour": i % NUM_COLOURS,
                "x": [_short(x) for x, _ in points],
                "y": [_short(y) for _, y in points],
                "best": chosen.get(name),
                "dashed": name in set(dashed),
            }
            for i, (name, points) in enumerate(drawn.items())
        ],
    }
    legend = "".join(_legend(i, *item, chosen.get(item[0])) for i, item in enumerate(drawn.items()))
    marked = "; ".join(f"{words} at {x_label} {text_of(x)}" for x, words in marks[-MAX_MARKS:])
    content = (
        element("header", element("figcaption", f"{text_of(name_of(title))} <small>by {text_of(x_label)}</small>"))
        + element("ul", legend, "dpt-legend")
        + element("div", "", "dpt-plot", role="img", tabindex=0, aria_label=f"{name_of(title)} by {x_label}")
        + (element("p", f"┆ {text_of(marked)}", "dpt-soft dpt-text") if marks else "")
        + f'<script type="application/json">{_json(data)}</script>'
    )
    return element("figure", content, "dpt-card dpt-chart")


def _finite(points: Iterable[tuple[float, float]]) -> Points:
    return [(x, y) for x, y in points if abs(x) <= MAX_VALUE and abs(y) <= MAX_VALUE]


def best_of(points: Points, mode: Literal["min", "max"]) -> tuple[float, float]:
    """Return a curve's lowest or highest point, the first of equal ones."""
    pick = min if mode == "min" else max
    return pick(points, key=lambda point: point[1])


def _legend(index: int, name: str, points: Points, best: tuple[float, float] | None) -> str:
    button = element("button", text_of(name_of(name)), type="button", aria_pressed="true")
    newest = text_of(points[-1][1]) if points else "no values"
    remark = f" best {text_of(best[1])} at {text_of(best[0])}" if best is not None else ""
    return element("li", f"{button}<b>{newest}</b>{remark}", style=f"--c:var(--c{index % NUM_COLOURS})")


def _short(value: float) -> float | int:
    rounded = float(f"{value:.6g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < LARGE else rounded


def _json(data: object) -> str:
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# ---- Curves


class Curve:
    """A metric over the training, with a bounded number of points.

    The curve is thinned by min-max decimation, as in audio editors. Of each bucket of successive points, the curve
    keeps the lowest and the highest, so no spike is lost. At the maximum number of buckets, neighbours are merged in
    pairs. The newest point is always kept.

    Examples:
        >>> from flytekitplugins.daskpytorch import report
        >>> curve = report.Curve(max_points=100)
        >>> for step in range(10_000):
        ...     curve.add((step, 9.0 if step == 5_000 else 1.0))
        >>> len(curve.points) <= 100, max(y for _, y in curve.points)
        (True, 9.0)
    """

    def __init__(self, max_points: int | None = None) -> None:
        self._max_buckets = max(1, ((max_points or MAX_POINTS) - 1) // 2)
        self._buckets: list[list[Point]] = []
        self._size = 1
        self._room = 0
        self._newest: Point | None = None

    def add(self, point: Point) -> None:
        """Add the next point (x, y)."""
        if self._room == 0:
            if len(self._buckets) >= self._max_buckets:
                self._halve()
            self._buckets.append([])
            self._room = self._size
        self._room -= 1
        self._newest = point
        bucket = self._buckets[-1]
        if len(bucket) < 2 or not (bucket[0][1] < point[1] < bucket[1][1] or bucket[1][1] < point[1] < bucket[0][1]):
            self._buckets[-1] = _extremes([*bucket, point])

    def cut(self, x: float) -> None:
        """Remove the points after `x`."""
        self._buckets = [kept for bucket in self._buckets if (kept := [point for point in bucket if point[0] <= x])]
        self._room = 0
        self._newest = self._newest if self._newest is not None and self._newest[0] <= x else None

    @property
    def points(self) -> list[tuple[float, float]]:
        """The kept points (x, y), in order."""
        kept = [point for bucket in self._buckets for point in bucket]
        return kept if self._newest is None or kept[-1:] == [self._newest] else [*kept, self._newest]

    def _halve(self) -> None:
        if len(self._buckets) % 2:
            self._buckets.append([])
        pairs = zip(self._buckets[::2], self._buckets[1::2], strict=True)
        self._buckets = [_extremes([*first, *second]) for first, second in pairs]
        self._size *= 2


def thinned(points: list[tuple[float, float]], max_points: int | None = None) -> list[tuple[float, float]]:
    """Return points (x, y), thinned without a loss of spikes. None: 2,000."""
    if len(points) <= (max_points or MAX_POINTS):
        return points
    curve = Curve(max_points)
    for point in points:
        curve.add(point)
    return curve.points


def _extremes(points: list[Point]) -> list[Point]:
    if len(points) < 3:
        return points
    lowest = min(points, key=operator.itemgetter(1))
    highest = max(reversed(points), key=operator.itemgetter(1))
    return [point for point in points if point is lowest or point is highest]


# ---- Timelines


@dataclass(frozen=True, kw_only=True)
class Event:
    """A text at a point in time.

    Examples:
        >>> from flytekitplugins.daskpytorch import report
        >>> event = report.Event(time=62.0, text="rank 1 was killed", detail="SIGKILL", tone="bad")
        >>> html = report.timeline([event], start=0.0)
    """

    time: float
    """Time in seconds, on the same clock as all events."""
    text: str
    """Description of the event, in one line."""
    detail: str = ""
    """Details in one or more lines. Of long details, the last 1,000 characters are shown."""
    tone: Tone = "idle"
    """Colour of the event."""


def timeline(events: Iterable[Event], start: float) -> str:
    """Return events as a table: the time since `start`, and what happened.

    Args:
        events: Events in the order of time.
        start: Time in seconds, on the events' clock.

    Examples:
        >>> from flytekitplugins.daskpytorch import report
        >>> html = report.timeline([report.Event(time=30.0, text="epoch 1 is over")], start=0.0)
    """
    rows = []
    for event in events:
        dot = element("span", "", f"dpt-dot dpt-{event.tone}", aria_hidden="true")
        detail = element("span", text_of(event.detail[-MAX_DETAIL:]), "dpt-soft") if event.detail else ""
        rows.append([f"+{duration(event.time - start)}", dot + text_of(one_line(event.text, MAX_TEXT)) + detail])
    return element("div", cells_table(["after", "what happened"], rows, "dpt-events"), "dpt-card")


def duration(seconds: float) -> str:
    """Return seconds as a text, such as `0.25 s`, `3 min 20 s`, `2 h 5 min`, `3.2 days`.

    Examples:
        >>> from flytekitplugins.daskpytorch import report
        >>> report.duration(200)
        '3 min 20 s'
    """
    if seconds < MINUTE:
        return f"{seconds:.0f} s" if seconds >= 10 or seconds == 0 else f"{seconds:.2g} s"
    minutes, rest = divmod(round(seconds), 60)
    if seconds < HOUR:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    if seconds < DAY:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{seconds / DAY:,.1f} days"
