"""Curves with a bounded number of points, made from any number of points."""

import operator

MAX_POINTS = 2_000
"""Maximum number of points of a curve. Longer curves are thinned."""
Point = tuple[int, float, float]
"""A point: step, x and y."""


class Curve:
    """A metric over the training, with a bounded number of points.

    The curve is thinned by min-max decimation, as in audio editors. Of each bucket of successive points, the curve
    keeps the lowest and the highest, so no spike is lost. When there are too many buckets, each two are merged.

    Examples:
        >>> from flytekitplugins.daskpytorch import report
        >>> curve = report.Curve(max_points=100)
        >>> for step in range(10_000):
        ...     curve.add((step, float(step), 9.0 if step == 5_000 else 1.0))  # step, x and y
        >>> len(curve.points) <= 100, max(y for _, y in curve.points)
        (True, 9.0)
    """

    def __init__(self, max_points: int | None = None) -> None:
        self._max_buckets = (max_points or MAX_POINTS) // 2
        self._buckets: list[list[Point]] = []
        self._size = 1
        """Number of points per bucket."""
        self._room = 0
        """Number of points that still fit into the last bucket."""

    def add(self, point: Point) -> None:
        """Add the next point."""
        if self._room == 0:
            if len(self._buckets) >= self._max_buckets:
                self._halve()
            self._buckets.append([])
            self._room = self._size
        self._room -= 1
        bucket = self._buckets[-1]
        if len(bucket) < 2 or not (bucket[0][2] < point[2] < bucket[1][2] or bucket[1][2] < point[2] < bucket[0][2]):
            self._buckets[-1] = _extremes([*bucket, point])

    def cut(self, step: int) -> None:
        """Remove the points of steps after this one."""
        self._buckets = [kept for bucket in self._buckets if (kept := [point for point in bucket if point[0] <= step])]
        self._room = 0

    @property
    def points(self) -> list[tuple[float, float]]:
        """The x and y of the kept points, in order."""
        return [(x, y) for bucket in self._buckets for _, x, y in bucket]

    def _halve(self) -> None:
        if len(self._buckets) % 2:
            self._buckets.append([])
        pairs = zip(self._buckets[::2], self._buckets[1::2], strict=True)
        self._buckets = [_extremes([*first, *second]) for first, second in pairs]
        self._size *= 2


def thinned(points: list[tuple[float, float]], max_points: int | None = None) -> list[tuple[float, float]]:
    """Return the points, thinned to at most `max_points`."""
    if len(points) <= (max_points or MAX_POINTS):
        return points
    curve = Curve(max_points)
    for x, y in points:
        curve.add((0, x, y))
    return curve.points


def _extremes(points: list[Point]) -> list[Point]:
    """Return the first lowest and the last highest point, in their order."""
    if len(points) < 3:
        return points
    lowest = min(points, key=_y_of)
    highest = max(reversed(points), key=_y_of)
    return [point for point in points if point is lowest or point is highest]


_y_of = operator.itemgetter(2)
