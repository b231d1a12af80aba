"""What a user sees while a gang trains: a live line in a terminal, plain lines elsewhere. Runs in the driver."""

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
"""Seconds between plain lines; a new epoch, and a record with other metrics than the last one, are always shown."""
LEADING = ("epoch", "loss")
RATE = "samples_per_second"
MAX_NAME = 60
"""Characters of a metric's name that are shown."""
MAX_LINE = 2_000
"""Characters that are shown of all that a record says."""
MAX_METRICS = 200
"""Whose newest values are kept for the end; where steps have metrics of their own names, those of the last record."""
MAX_HELD = 10_000
"""Lines that wait until a debugger leaves the terminal; of more, the newest."""
LARGE = 1e15
"""From here on numbers are shown by their power of ten."""
WIDE = 100
"""Columns of a terminal that has room for a bar, for all that is leading, and for the time since the start."""
LARGE_RATE = 10.0
"""Steps per second from which on their fractions do not matter."""
MINUTE = 60.0
DAY = 86_400.0
MAX_LEFT = 1e9
"""Seconds that may be left; what comes to more is no estimate."""


class Echo(Observer):
    """Writes what the ranks write to this process's standard error, with their ranks, and what happens to the gang."""

    def __init__(self, name: str = "") -> None:
        self._name = _short(name)
        self._goodput: Goodput | None = None
        self._held: deque[str] | None = None
        """Lines to be written once a rank's debugger leaves the terminal."""

    def placed(self, shape: Shape) -> None:
        """Know its name."""
        self._name = _short(shape.name)

    def accounted(self, goodput: Goodput) -> None:
        """Remember it for the end."""
        self._goodput = goodput

    def noted(self, text: str) -> None:
        """Say it."""
        self._print(text)

    def wrote(self, rank: int, lines: list[str]) -> None:
        """Pass on a rank's output."""
        self._print("\n".join(f"[rank {rank}] {line}" for line in lines))

    def debugging(self, rank: int | None) -> None:
        """Keep quiet until the debugger has left the terminal."""
        held, self._held = self._held or (), deque(maxlen=MAX_HELD) if rank is not None else None
        for text in held:
            self._print(text)

    def ended(self, error: Exception | None) -> None:
        """Say in a line who failed, and how, since perhaps nobody asks the futures; and where the time went."""
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
    """Shows rank 0's metrics as they come, and every rank's output marked with its rank, on standard error."""

    def __init__(self, console: Console | None = None, name: str = "") -> None:
        super().__init__(name)
        self._console = console or terminal()
        self._began_at = time.monotonic()
        self._bar: Progress | None = None
        """From the moment that all have met; in a terminal it is to be seen, elsewhere it only counts."""
        self._task: TaskID | None = None
        self._pace = Pace()
        self._shown_at = 0.0
        self._epoch = 0
        self._newest: LogRecord | None = None
        """With the newest value of each metric."""
        self._newest_names: set[str] = set()

    def placed(self, shape: Shape) -> None:
        """Say what is being started."""
        super().placed(shape)
        devices = sorted({gpu for node in shape.nodes for gpu in node.gpu_names}) or ["CPU"]
        self._print(f"{self._name}: starting {size_of(shape)} ({', '.join(devices)}, {shape.backend})")

    def formed(self, seconds: float) -> None:
        """Say that training begins, and open the live display."""
        self._print(f"{self._name}: all ranks have met after {seconds:.2f} s")
        self._bar = _live(self._console)
        self._task = self._bar.add_task("", name=self._name, text="", pace="", total=None)
        if self._console.is_terminal:
            self._bar.start()

    def logged(self, record: LogRecord) -> None:
        """Show rank 0's newest values."""
        if record.rank != 0:
            return
        if self._bar is not None and self._console.is_terminal and self._held is None:
            self._bar.start()  # again, if it had stepped aside
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
        """Say it of this training."""
        self._print(f"{self._name}: {text}")

    def debugging(self, rank: int | None) -> None:
        """Step aside: no live display, and nothing said, until the debugger has left the terminal."""
        if rank is not None:
            self._stop()
        super().debugging(rank)

    def restarting(self, reason: str, step: int | None) -> None:
        """Take the live display away until the ranks have met again."""
        self.ended(None)
        self._bar = self._newest = None
        self._pace.clear()

    def ended(self, error: Exception | None) -> None:
        """Leave the terminal as it was."""
        self.debugging(None)
        self._stop()

    def conclude(self, how: str, places: Mapping[str, str], advice: str | None = None) -> None:
        """Say how it has ended, when, with which values, what to do, where things are, and last where the time went."""
        values = f", {describe_record(self._newest)}" if self._newest is not None else ""
        text = f"{self._name}: {how} after {_duration(time.monotonic() - self._began_at)}{values}"
        self._print(text if advice is None else f"{text}; {advice}")
        for what, where in places.items():
            self._print(f"  {what}: {where}")
        self._tell_goodput()

    def _stop(self) -> None:
        if self._bar is not None and self._console.is_terminal:  # elsewhere it writes an empty line
            self._bar.stop()

    def _show(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)


def terminal(*, is_plain: bool = False) -> Console:
    """Standard error, as `rich` writes to it; plain: without lines that change, which a debugger's would meet."""
    return Console(file=cast("IO[str]", Screen()), highlight=False, force_terminal=False if is_plain else None)


def _live(console: Console) -> Progress:
    """One line that changes: in a narrow terminal the name, step, loss, steps per second and the time that is left."""
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
    """Return steps per second, and how long the rest takes at that; nothing once all steps are done."""
    if not speed or (record.num_steps is not None and num_done(record) >= record.num_steps):
        return ""
    rate = f"{speed:,.0f} steps/s" if speed >= LARGE_RATE else f"{speed:.2g} steps/s"
    left = seconds_left(record, speed)
    return rate if left is None or not 0 <= left <= MAX_LEFT else f"{rate}  {_duration(left)} left"


def bars(console: Console, *first: ProgressColumn) -> Progress:
    """Lines that change, each with these columns, a bar, a text and the time."""
    text = TextColumn("{task.fields[text]}", markup=False)
    return Progress(*first, BarColumn(bar_width=24), text, TimeElapsedColumn(), console=console, transient=True)


def show(progress: Progress, task: TaskID, record: LogRecord) -> None:
    """Show the newest values in one of them."""
    progress.update(task, completed=num_done(record), total=record.num_steps, text=describe_record(record, LEADING))


def describe_record(record: LogRecord, only: Collection[str] | None = None) -> str:
    """A record in a line: epoch, step, loss, the other values (or only those named), samples/s."""
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
