"""Log records, pace and errors as lines of text. Runs in the driver."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from flytekitplugins.daskpytorch.display.run_state import MAX_VALUES, Values
from flytekitplugins.daskpytorch.display.training import num_done, seconds_left
from flytekitplugins.daskpytorch.errors import GangError
from flytekitplugins.daskpytorch.process.streams import one_line
from flytekitplugins.daskpytorch.records import LogRecord
from flytekitplugins.daskpytorch.report import duration
from flytekitplugins.daskpytorch.report.pieces import name_of

MAX_LINE = 2_000
"""Maximum number of characters of a line with a record's metrics."""
LARGE = 1e15
"""Smallest absolute value of a whole number that is shown with an exponent, as in 1e+15."""
LARGE_RATE = 10.0
"""Smallest rate, in steps per second, that is shown as a whole number."""
MAX_LEFT = 1e9
"""Longest estimate of a training's remaining time, in seconds, that is shown."""


@dataclass
class News:
    """Decides which records get a permanent line: one in each epoch, and one for each additional metric."""

    _epoch: int | None = None
    _known: set[str] = field(default_factory=set)
    _expected: set[str] = field(default_factory=set)
    """Metrics of the epoch before. With the last of them, an epoch is complete."""
    _seen: set[str] = field(default_factory=set)
    """Metrics of this epoch."""
    _is_told: bool = False
    """True once this epoch has its line."""
    _newest: set[str] = field(default_factory=set)

    def take(self, record: LogRecord, *, is_due: bool) -> bool:
        """Note a record, and return True if it is news.

        Without epochs, a record with other metrics than the one before is news if a line is due.
        """
        names = set(record.metrics)
        is_late = is_new = False
        if record.epoch not in (None, self._epoch):
            is_late = self._epoch is not None and not self._is_told
            self._epoch, self._expected, self._seen, self._is_told = record.epoch, self._seen, set(), False
        if len(self._known) < MAX_VALUES:
            is_new = not names <= self._known
            self._known |= names
        changes, self._newest = not names <= self._newest, names
        self._seen |= names & self._known
        is_complete = not self._is_told and self._seen >= self._expected
        is_news = is_late or is_new or is_complete or (self._epoch is None and changes and is_due)
        self._is_told |= is_news
        return is_news


def describe_values(values: Values) -> str:
    """Return the newest values as a line, older ones with their step. Empty without records."""
    return "" if values.record is None else describe_record(values.record, steps=values.steps)


def describe_record(
    record: LogRecord, only: Collection[str] | None = None, steps: Mapping[str, int] | None = None
) -> str:
    """Return a record as a line: epoch, step, loss, other values, samples/s.

    Args:
        record: Record with the values.
        only: Names of the values to show. None: all values.
        steps: Steps of values that are older or newer than the record, by name.
    """
    numbers = {name: value for name, value in record.numbers.items() if only is None or name in only}
    epoch, rate = numbers.pop("epoch", None), numbers.pop("samples_per_second", None)
    parts = [] if epoch is None else [f"epoch {epoch:g}"]
    parts.append(f"step {record.step}" + (f"/{record.num_steps}" if record.num_steps else ""))
    names = sorted(numbers, key=lambda name: name != "loss")
    at = {name: f" (step {step})" for name, step in (steps or {}).items() if step != record.step}
    parts += [f"{name_of(name)} {_brief(numbers[name])}{at.get(name, '')}" for name in names]
    if rate is not None:
        parts.append(f"{_brief(rate, is_whole=True)} samples/s")
    return one_line("  ".join(parts), MAX_LINE)


def pace_in_words(record: LogRecord, speed: float | None) -> str:
    """Return steps per second and remaining time as text. Empty if the speed is unknown, and after the last step."""
    if not speed or (record.num_steps is not None and num_done(record) >= record.num_steps):
        return ""
    rate = f"{speed:,.0f} steps/s" if speed >= LARGE_RATE else f"{speed:.2g} steps/s"
    left = seconds_left(record, speed)
    return rate if left is None or not 0 <= left <= MAX_LEFT else f"{rate}  {duration(left)} left"


def in_a_line(error: Exception) -> str:
    """Return the text of an error, or of the `GangError` that caused it and names the failed rank, in one line."""
    cause = error.__cause__ if isinstance(error.__cause__, GangError) else error
    kind = "" if isinstance(cause, GangError) else f"{type(cause).__name__}: "
    return kind + one_line(str(cause).partition("\n")[0], MAX_LINE)


def _brief(value: float, *, is_whole: bool = False) -> str:
    return f"{value:,.0f}" if (is_whole or value.is_integer()) and abs(value) < LARGE else f"{value:.4g}"
