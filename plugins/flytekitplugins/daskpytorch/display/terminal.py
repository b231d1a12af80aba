"""Display of a gang's training: a live line in a terminal, plain lines elsewhere. Runs in the driver."""

import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import IO, cast

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column
from rich.text import Text

from flytekitplugins.daskpytorch.context import LogRecord
from flytekitplugins.daskpytorch.display.training import Pace, num_done, seconds_left, size_of
from flytekitplugins.daskpytorch.errors import GangError
from flytekitplugins.daskpytorch.goodput import MIN_TOTAL, Goodput
from flytekitplugins.daskpytorch.process.streams import Screen, one_line
from flytekitplugins.daskpytorch.protocol.observer import Observer, Shape

PLAIN_INTERVAL = 10.0
"""Minimum number of seconds between two plain lines. A new epoch or a metric that the last record lacked is shown at
once."""
LEADING = ("epoch", "loss")
RATE = "samples_per_second"
MAX_NAME = 60
"""Maximum number of characters of a metric's name."""
MAX_LINE = 2_000
"""Maximum number of characters of a record's line."""
MAX_METRICS = 200
"""Maximum number of metrics whose newest values are kept for the end. Beyond, only the last record's metrics are
kept."""
MAX_HELD = 10_000
"""Maximum number of lines that wait until a debugger leaves the terminal. Older lines are dropped."""
LARGE = 1e15
"""Smallest number that is shown by its power of ten."""
WIDE = 100
"""Minimum number of columns of a terminal for a bar, the leading metrics and the time since the start."""
LARGE_RATE = 10.0
"""Minimum number of steps per second that are shown without a fraction."""
MINUTE = 60.0
DAY = 86_400.0
MAX_LEFT = 1e9
"""Maximum number of seconds of an estimate of the time left. Longer estimates are not shown."""


class Echo(Observer):
    """Writes each rank's output, marked with the rank, and the gang's notices to this process's standard error."""

    def __init__(self, name: str = "") -> None:
        self._name = _short(name)
        self._goodput: Goodput | None = None
        self._held: deque[str] | None = None
        """Lines that wait until a rank's debugger leaves the terminal. None without a debugger."""

    def placed(self, shape: Shape) -> None:
        """Keep the gang's name."""
        self._name = _short(shape.name)

    def accounted(self, goodput: Goodput) -> None:
        """Keep the newest account of the gang's time for the end."""
        self._goodput = goodput

    def noted(self, text: str) -> None:
        """Write a notice."""
        self._print(text)

    def wrote(self, rank: int, lines: list[str]) -> None:
        """Write a rank's output, each line marked with the rank."""
        self._print("\n".join(f"[rank {rank}] {line}" for line in lines))

    def debugging(self, rank: int | None) -> None:
        """Hold all lines while a rank's debugger has the terminal. None writes the held lines."""
        held, self._held = self._held or (), deque(maxlen=MAX_HELD) if rank is not None else None
        for text in held:
            self._print(text)

    def ended(self, error: Exception | None) -> None:
        """Write the error in one line, since the caller may never ask the futures, and the account of the time."""
        self.debugging(None)
        told = error if isinstance(error, GangError) else error and error.__cause__
        if isinstance(told, GangError):
            self._print(one_line(str(told).partition("\n")[0], MAX_LINE))
        if self._name:
            self._tell_goodput()

    def _tell_goodput(self) -> None:
        if self._goodput is not None and self._goodput.total >= MIN_TOTAL:
            self._print(f"{self._name}: {self._goodput}")

    def _print(self, text: str) -> None:
        if self._held is not None:
            self._held.append(text)
        else:
            self._show(text)

    def _show(self, text: str) -> None:
        Screen().write(f"{text}\n")


class ProgressDisplay(Echo):
    """Display of rank 0's newest metrics and of each rank's output, marked with the rank, on standard error."""

    def __init__(self, console: Console | None = None, name: str = "") -> None:
        super().__init__(name)
        self._console = console or terminal()
        self._began_at = time.monotonic()
        self._bar: Progress | None = None
        """Progress bar, from the meeting of the ranks. Visible in a terminal only."""
        self._task: TaskID | None = None
        self._pace = Pace()
        self._shown_at = 0.0
        self._epoch = 0
        self._newest: LogRecord | None = None
        """Newest record, with the newest value of each metric."""
        self._newest_names: set[str] = set()

    def placed(self, shape: Shape) -> None:
        """Write the gang's size, devices and backend."""
        super().placed(shape)
        devices = sorted({gpu for node in shape.nodes for gpu in node.gpu_names}) or ["CPU"]
        self._print(f"{self._name}: starting {size_of(shape)} ({', '.join(devices)}, {shape.backend})")

    def formed(self, seconds: float) -> None:
        """Write that all ranks have met, and open the live display."""
        self._print(f"{self._name}: all ranks have met after {seconds:.2f} s")
        self._bar = _live(self._console)
        self._task = self._bar.add_task("", name=self._name, text="", pace="", total=None)
        if self._console.is_terminal:
            self._bar.start()

    def logged(self, record: LogRecord) -> None:
        """Show the newest values of rank 0."""
        if record.rank != 0:
            return
        if self._bar is not None and self._console.is_terminal and self._held is None:
            self._bar.start()  # again, after a debugger
        self._pace.add(record.time, record.step)
        pace = _pace_in_words(record, self._pace.per_second)
        if self._bar is not None and self._task is not None:
            show(self._bar, self._task, record if self._console.width >= WIDE else _only_loss(record))
            self._bar.update(self._task, pace=pace)
        earlier = self._newest.metrics if self._newest is not None else {}
        epoch = record.epoch or 0
        brings_news = epoch != self._epoch or not self._newest_names.issuperset(record.metrics)
        is_due = not self._console.is_terminal and time.monotonic() - self._shown_at >= PLAIN_INTERVAL
        known = {**earlier, **record.metrics}
        self._newest = replace(record, metrics=known if len(known) <= MAX_METRICS else record.metrics)
        self._epoch, self._newest_names = epoch, set(record.metrics)
        if brings_news or is_due:
            self._shown_at = time.monotonic()
            self._print(f"{self._name}: {describe_record(record)}{pace and f'  {pace}'}")

    def say(self, text: str) -> None:
        """Write a notice with the training's name."""
        self._print(f"{self._name}: {text}")

    def debugging(self, rank: int | None) -> None:
        """Stop the live display and hold all lines while a rank's debugger has the terminal."""
        if rank is not None:
            self._stop()
        super().debugging(rank)

    def restarting(self, reason: str, step: int | None) -> None:
        """Remove the live display until the ranks have met again."""
        self.ended(None)
        self._bar = self._newest = None
        self._pace.clear()

    def ended(self, error: Exception | None) -> None:
        """Remove the live display and write the held lines."""
        self.debugging(None)
        self._stop()

    def conclude(self, how: str, places: Mapping[str, str], advice: str | None = None) -> None:
        """Write the outcome, the duration, the last values, the advice, the addresses, and the account of the time."""
        values = f", {describe_record(self._newest)}" if self._newest is not None else ""
        text = f"{self._name}: {how} after {_duration(time.monotonic() - self._began_at)}{values}"
        self._print(text if advice is None else f"{text}; {advice}")
        for what, where in places.items():
            self._print(f"  {what}: {where}")
        self._tell_goodput()

    def _stop(self) -> None:
        if self._bar is not None and self._console.is_terminal:  # without a terminal, rich writes an empty line here
            self._bar.stop()

    def _show(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)


def terminal(*, is_plain: bool = False) -> Console:
    """Return a console of `rich` on standard error.

    Args:
        is_plain: True for no live display, which a debugger's prompt would collide with.
    """
    return Console(file=cast("IO[str]", Screen()), highlight=False, force_terminal=False if is_plain else None)


def _live(console: Console) -> Progress:
    """Return the live line: name, step, loss, pace and time left. Wide terminals add a bar and the elapsed time."""
    name = TextColumn("{task.fields[name]}", style="bold", markup=False)
    text = TextColumn("{task.fields[text]}", markup=False)
    columns = [name, text, _Pace()]
    if console.width >= WIDE:
        columns = [SpinnerColumn(), name, BarColumn(bar_width=24), text, _Pace(), TimeElapsedColumn()]
    return Progress(*columns, console=console, transient=True)


class _Pace(ProgressColumn):
    def __init__(self) -> None:
        super().__init__(table_column=Column(no_wrap=True))

    def render(self, task: Task) -> Text:
        return Text(f" {task.fields['pace']}")


def _pace_in_words(record: LogRecord, speed: float | None) -> str:
    """Return the steps per second and the time left. Empty without a pace, and after the last step."""
    if not speed or (record.num_steps is not None and num_done(record) >= record.num_steps):
        return ""
    rate = f"{speed:,.0f} steps/s" if speed >= LARGE_RATE else f"{speed:.2g} steps/s"
    left = seconds_left(record, speed)
    return rate if left is None or not 0 <= left <= MAX_LEFT else f"{rate}  {_duration(left)} left"


def bars(console: Console, *first: ProgressColumn) -> Progress:
    """Return a live display whose lines have the given columns, a bar, a text and the elapsed time."""
    text = TextColumn("{task.fields[text]}", markup=False)
    return Progress(*first, BarColumn(bar_width=24), text, TimeElapsedColumn(), console=console, transient=True)


def show(progress: Progress, task: TaskID, record: LogRecord) -> None:
    """Show a record's values in one line of a live display."""
    progress.update(task, completed=num_done(record), total=record.num_steps, text=describe_record(record, LEADING))


def describe_record(record: LogRecord, only: Collection[str] | None = None) -> str:
    """Return a record as a line: epoch, step, loss, other values, samples/s.

    Args:
        record: Record with the values.
        only: Names of the other values to show. None: all values.
    """
    numbers = record.numbers
    parts = [f"epoch {numbers['epoch']:g}"] if "epoch" in numbers else []
    parts.append(f"step {record.step}" + (f"/{record.num_steps}" if record.num_steps else ""))
    names = [name for name in ("loss",) if name in numbers]
    names += [name for name in numbers if name not in (*LEADING, RATE) and (only is None or name in only)]
    parts += [f"{one_line(name, MAX_NAME)} {_brief(numbers[name])}" for name in names]
    if RATE in numbers:
        parts.append(f"{_brief(numbers[RATE], is_whole=True)} samples/s")
    return one_line("  ".join(parts), MAX_LINE)


def _only_loss(record: LogRecord) -> LogRecord:
    return replace(record, metrics={name: value for name, value in record.metrics.items() if name == "loss"})


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def _duration(seconds: float) -> str:
    if seconds < MINUTE:
        return f"{seconds:.3g} s"
    return str(timedelta(seconds=round(seconds))) if seconds < DAY else f"{seconds / DAY:,.1f} days"


def _brief(value: float, *, is_whole: bool = False) -> str:
    return f"{value:,.0f}" if (is_whole or value.is_integer()) and abs(value) < LARGE else f"{value:.4g}"
