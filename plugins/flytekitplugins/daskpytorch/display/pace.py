"""How fast a training goes: one computation for the terminal, the Deck's figures, charts and tables. In the driver."""

from collections import deque

from flytekitplugins.daskpytorch.context import LogRecord

WINDOW = 10.0
"""Seconds over which steps are counted; more where two reports are further apart."""
MIN_DISTANCE = WINDOW / 100
"""Seconds between two reports that are kept."""


class Pace:
    """Steps per second over the last ten seconds."""

    def __init__(self) -> None:
        self._reports: deque[tuple[float, int]] = deque()
        """Seconds on any clock, and the number of steps by then."""

    def add(self, moment: float, num_steps: int) -> None:
        """Take a report; one with fewer steps than the last one begins afresh."""
        reports = self._reports
        if reports and num_steps < reports[-1][1]:
            reports.clear()
        if len(reports) > 1 and reports[-1][0] - reports[-2][0] < MIN_DISTANCE:
            reports.pop()
        reports.append((max(moment, reports[-1][0]) if reports else moment, num_steps))
        while len(reports) > 2 and reports[1][0] <= moment - WINDOW:
            reports.popleft()

    @property
    def per_second(self) -> float | None:
        """Steps per second; None before two reports have come."""
        if not self._reports or self._reports[-1][0] <= self._reports[0][0]:
            return None
        (begin, before), (end, after) = self._reports[0], self._reports[-1]
        return (after - before) / (end - begin)

    def clear(self) -> None:
        """Begin afresh."""
        self._reports.clear()


def num_done(record: LogRecord) -> int:
    """Steps that are done by a record, where the record says how many there are; else its step."""
    return record.step if record.num_steps is None else min(record.step + 1, record.num_steps)


def seconds_left(record: LogRecord, per_second: float | None) -> float | None:
    """Return how long the remaining steps take; None where their number or the pace is not known."""
    if not record.num_steps or not per_second:
        return None
    return max(0.0, (record.num_steps - num_done(record)) / per_second)
