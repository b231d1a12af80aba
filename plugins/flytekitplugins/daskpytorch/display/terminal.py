"""Displays of gangs: a live line for each gang in a terminal, plain lines elsewhere. Run in the driver."""

import threading
import time
import weakref
from collections import deque
from collections.abc import Collection, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass, field, replace
from textwrap import TextWrapper
from typing import IO, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column

from flytekitplugins.daskpytorch.display.run_state import MAX_VALUES, RunState, Values, View
from flytekitplugins.daskpytorch.display.training import GIB, num_done, seconds_left, size_of
from flytekitplugins.daskpytorch.errors import GangCancelledError, GangError, PreemptedError, StoppedEarlyError
from flytekitplugins.daskpytorch.process.streams import Screen, one_line
from flytekitplugins.daskpytorch.protocol import journal
from flytekitplugins.daskpytorch.records import MIN_TOTAL, LogRecord
from flytekitplugins.daskpytorch.report import duration
from flytekitplugins.daskpytorch.report.pieces import brief, name_of

MAX_LINE = 2_000
LARGE_RATE = 10.0
MAX_LEFT = 1e9


@dataclass
class News:
    _epoch: int | None = None
    _known: set[str] = field(default_factory=set)
    _expected: set[str] = field(default_factory=set)
    _seen: set[str] = field(default_factory=set)
    _is_told: bool = False
    _newest: set[str] = field(default_factory=set)

    def take(self, record: LogRecord, *, is_due: bool) -> bool:
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
    record = values.record
    return "" if record is None else describe_record(replace(record, metrics=values.metrics), steps=values.steps)


def describe_record(
    record: LogRecord, only: Collection[str] | None = None, steps: Mapping[str, int] | None = None
) -> str:
    """Return a record as a line: epoch, step, loss, other values, samples/s.

    `only` names the shown values. `steps` has the steps of values that are older or newer than the record.
    """
    numbers = {name: value for name, value in record.numbers.items() if only is None or name in only}
    epoch, rate = numbers.pop("epoch", None), numbers.pop("samples_per_second", None)
    parts = [] if epoch is None else [f"epoch {epoch:g}"]
    parts.append(f"step {record.step}" + (f"/{record.num_steps}" if record.num_steps else ""))
    names = sorted(numbers, key=lambda name: name != "loss")
    at = {name: f" (step {step})" for name, step in (steps or {}).items() if step != record.step}
    parts += [f"{name_of(name)} {brief(numbers[name])}{at.get(name, '')}" for name in names]
    if rate is not None:
        parts.append(f"{brief(rate)} samples/s")
    return one_line("  ".join(parts), MAX_LINE)


def pace_in_words(record: LogRecord, speed: float | None) -> str:
    if not speed or (record.num_steps is not None and num_done(record) >= record.num_steps):
        return ""
    rate = f"{speed:,.0f} steps/s" if speed >= LARGE_RATE else f"{speed:.2g} steps/s"
    left = seconds_left(record, speed)
    return rate if left is None or not 0 <= left <= MAX_LEFT else f"{rate}  {duration(left)} left"


def in_a_line(error: Exception) -> str:
    cause = error.__cause__ if isinstance(error.__cause__, GangError) else error
    kind = "" if isinstance(cause, GangError) else f"{type(cause).__name__}: "
    return kind + one_line(str(cause).partition("\n")[0], MAX_LINE)


PLAIN_INTERVAL = 10.0
"""Seconds between two lines with metrics outside a terminal. A new epoch or additional metric is shown at once."""
LIVE = ("epoch", "loss", "samples_per_second")
MAX_HELD = 10_000
"""Lines that wait while a rank's debugger has the terminal, or until the end of a cell with `%%ranks`.

Older lines are dropped.
"""
WIDE = 100

MIN_CALL = 1.0


class Board:
    """Lines on standard error that all gangs' displays share: permanent lines, and a terminal's live lines."""

    output: Screen | None = None
    """Stream of the ranks' output, set by `daskpytorch run`.

    Boards then have no live lines: a pipe to `tee` leads to the same terminal. None: standard error, as for all other
    lines.
    """

    def __init__(self, console: Console | None = None, *, is_quiet: bool = False, is_plain: bool = False) -> None:
        """`is_quiet` shows no metrics: the user has not asked for them, or a notebook's table has them.

        `is_plain` shows no live lines, which a debugger's prompt would collide with. A notebook gets plain lines.
        """
        screen, is_terminal = cast("IO[str]", Screen()), False if is_plain or self.output is not None else None
        self._console = console or Console(
            file=screen, highlight=False, force_terminal=is_terminal, force_jupyter=False
        )
        self.is_quiet = is_quiet
        self.is_live = self._console.is_terminal and not is_quiet
        is_wide = self._console.width >= WIDE
        self._shown = LIVE if is_wide else ("loss",)
        self._held: deque[tuple[str, bool]] | None = None
        self._lock = threading.RLock()
        short = Column(no_wrap=True, max_width=self._console.width // 3)  # else a long name takes the loss's place
        name = TextColumn("{task.fields[name]}", style="bold", markup=False, table_column=short)
        text = TextColumn("{task.fields[text]}", markup=False)
        pace = TextColumn(" {task.fields[pace]}", markup=False, table_column=Column(no_wrap=True))
        wide = (SpinnerColumn(), name, BarColumn(bar_width=24), text, pace, TimeElapsedColumn())
        self.bars = Progress(*(wide if is_wide else (name, text, pace)), console=self._console, transient=True)
        if self.is_live:  # a program may end before its gang, and would leave the terminal without a cursor
            weakref.finalize(self, self.bars.stop)

    def add(self, name: str, began_at: float) -> TaskID | None:
        if not self.is_live:
            return None
        with self._lock:
            if self._held is None:
                self.bars.start()
            line = self.bars.add_task("", name=name, text="", pace="", total=None)
            self.bars.tasks[-1].start_time = began_at
            return line

    def update(self, line: TaskID, record: LogRecord, pace: str) -> None:
        text = describe_record(record, self._shown)
        self.bars.update(line, completed=num_done(record), total=record.num_steps, text=text, pace=pace)

    def rename(self, line: TaskID, name: str, text: str) -> None:
        self.bars.update(line, name=name, text=text, pace="", completed=0, total=None)

    def remove(self, line: TaskID) -> None:
        with self._lock:
            self.bars.remove_task(line)
            if not self.bars.tasks:
                self.bars.stop()

    def print(self, text: str, *, is_output: bool = False) -> None:
        with self._lock:
            if self._held is not None:
                self._held.append((text, is_output))
            elif is_output and self.output is not None:
                self.output.write(f"{text}\n")
                self.output.flush()
            elif self.is_live:
                text = text if is_output else self._filled(text)
                self._console.print(text, markup=False, emoji=False, soft_wrap=True)
            else:  # rich would replace tabs by spaces
                self._console.file.write(f"{text}\n")
                self._console.file.flush()

    def _filled(self, text: str) -> str:
        """Break lines between words: a terminal would break figures."""
        fill = TextWrapper(
            max(20, self._console.width), subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
        return "\n".join(fill.fill(line) for line in text.splitlines())

    def hold(self, *, is_held: bool) -> None:
        with self._lock:
            held, self._held = self._held or (), deque(maxlen=MAX_HELD) if is_held else None
            for text, is_output in held:
                self.print(text, is_output=is_output)
            if self.is_live:  # without a terminal, rich writes an empty line here
                self.bars.stop()
                if self.bars.tasks and not is_held:
                    self.bars.start()


class Display(View):
    _has_row = True

    def __init__(self, board: Board, name: str = "", mark: str = "") -> None:
        self.state = RunState()
        self._board = board
        self._name = name
        self._mark = mark
        self._line: TaskID | None = None
        self._is_debugging = False
        self._shown_at = 0.0
        self._news, self._row = News(), Values()

    def on_event(self, event: journal.Event) -> None:
        match event:
            case journal.Formed():
                self._begin_line(event)
            case journal.Wrote():
                text = "\n".join(f"[{self._mark}rank {event.rank}] {line}" for line in event.lines)
                self._board.print(text, is_output=True)
            case journal.Prompted():
                self._hold(event.rank)
            case journal.Logged():
                self._show_record(event.record)
            case journal.Restarted():
                self._close_line()
            case journal.Noted():
                self._board.print(f"{self._mark}{event.line}")
            case journal.Ended():
                self._conclude(event.error)

    @property
    def _title(self) -> str:
        return self._name or self.state.title

    def say(self, text: str) -> None:
        self._board.print(f"{self._title}: {text}")

    def _begin_line(self, event: journal.Formed) -> None:
        self._news, self._row = News(), Values()  # the first record of an attempt is news
        if self._line is None:
            begun = event.time - (self.state.formed_at or event.time)
            self._line = self._board.add(self._title, time.monotonic() - begun)

    def _hold(self, rank: int | None) -> None:
        if self._is_debugging != (rank is not None):
            self._is_debugging = rank is not None
            self._board.hold(is_held=self._is_debugging)

    def _show_record(self, record: LogRecord) -> None:
        if record.rank != 0 or self._board.is_quiet:
            return
        if record.is_evaluation:
            self.say(f"evaluated: {describe_record(record)}")
            return
        pace = pace_in_words(record, self.state.rate.per_second)
        if self._line is not None:
            self._board.update(self._line, record, pace)
        is_live, is_due = self._board.is_live, time.monotonic() - self._shown_at >= PLAIN_INTERVAL
        self._row.add(record)
        is_news = self._news.take(record, is_due=is_due)
        # A terminal shows many models by their live lines alone.
        if not (is_live and self._mark) and (is_news or (is_due and not is_live)):
            self._shown_at = time.monotonic()
            self.say(f"{describe_values(self._row)}{pace and f'  {pace}'}")
            self._row = Values()

    def _conclude(self, error: Exception | None) -> None:
        self._close_line()
        self._tell_error(error)
        self._tell_goodput()

    def _tell_error(self, error: Exception | None) -> None:
        if isinstance(error, StoppedEarlyError):
            if not self._board.is_quiet:
                how = f"after epoch {error.epoch}: {error.metric} {brief(error.value)}"
                self._board.print(f"{self._title} was stopped early, {how}")
        elif error is not None and not isinstance(error, (CancelledError, GangCancelledError)):
            how = "" if isinstance(error, PreemptedError) else f"{self._title or 'the gang'} failed: "
            self._board.print(f"{how}{in_a_line(error)}")

    def _close_line(self) -> None:
        self._hold(None)
        if self._line is not None:
            self._board.remove(self._line)
            self._line = None

    def _tell_goodput(self) -> None:
        goodput, is_in_table = self.state.goodput, self._has_row and self._board.is_quiet and bool(self._mark)
        if goodput is not None and goodput.total >= MIN_TOTAL and self._title and not is_in_table:
            self.say(str(goodput))


class ProgressDisplay(Display):
    _has_row = False

    def __init__(
        self, board: Board, name: str = "", mark: str = "", *, unsaid: tuple[type[Exception], ...] = (Exception,)
    ) -> None:
        """Errors of the classes `unsaid` have no line of their own.

        By default none has one, since a task raises its error.
        """
        super().__init__(board, name, mark)
        self.board = board
        self.is_over = False
        self._unsaid = unsaid

    def on_event(self, event: journal.Event) -> None:
        match event:
            case journal.Placed(shape=shape):
                devices = sorted({gpu for node in shape.nodes for gpu in node.gpu_names}) or ["CPU"]
                self.say(f"starting {size_of(shape)} ({', '.join(devices)}, {shape.backend})")
            case journal.Formed(seconds=seconds):
                self.say(f"all ranks have met after {seconds:.2f} s")
            case journal.Calling(name=name):
                self._news, self._row = News(), Values()
                if self._line is not None:
                    self._board.rename(self._line, name.rpartition(".")[2], "")
            case journal.Called():
                self._show_called(event)
            case journal.Used() if self.state.stays and self.state.call is None:
                self._show_idle()
        super().on_event(event)

    @property
    def _title(self) -> str:
        return self.state.call.rpartition(".")[2] if self.state.call is not None else super()._title

    def _show_called(self, event: journal.Called) -> None:
        seconds, values = event.time - self.state.called_at, describe_values(self.state.values)
        if event.end.error or values or seconds >= MIN_CALL:
            name = event.name.rpartition(".")[2]
            self._board.print(f"{name}: {event.end.word} after {duration(seconds)}{values and f', {values}'}")
        self._show_idle()

    def _show_idle(self) -> None:
        if self._line is not None:
            held = self.state.memory / GIB
            self._board.rename(self._line, self._title, f"idle, its ranks hold {held:.1f} GiB" if held else "idle")

    def _conclude(self, error: Exception | None) -> None:
        self._close_line()
        if not isinstance(error, self._unsaid):
            self._tell_error(error)

    def conclude(self, how: str, places: Mapping[str, str], advice: str | None = None) -> None:
        self.is_over = True
        values = "" if self.state.stays else describe_values(self.state.values)
        text = f"{how} after {duration(self.state.clock() - self.state.began_at)}{values and f', {values}'}"
        self.say(text if advice is None else f"{text}; {advice}")
        for what, where in places.items():
            self._board.print(f"  {what}: {where}")
        self._tell_goodput()
