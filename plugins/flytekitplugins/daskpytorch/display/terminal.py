"""Displays of gangs: live lines in a terminal, plain lines elsewhere, JSON objects for machines. Run in the driver."""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping
from concurrent.futures import CancelledError
from dataclasses import KW_ONLY, dataclass, replace
from typing import IO, Any, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column

from flytekitplugins.daskpytorch.display.run_state import Values, View
from flytekitplugins.daskpytorch.display.training import is_held_out, num_done, seconds_left, size_of
from flytekitplugins.daskpytorch.errors import GangCancelledError, GangError, PreemptedError, StoppedEarlyError
from flytekitplugins.daskpytorch.process import streams
from flytekitplugins.daskpytorch.process.streams import Screen, one_line
from flytekitplugins.daskpytorch.protocol import journal
from flytekitplugins.daskpytorch.records import MIN_TOTAL, LogRecord
from flytekitplugins.daskpytorch.report import duration
from flytekitplugins.daskpytorch.report.pieces import brief, name_of

MAX_LINE = 2_000
MAX_LEFT = 1e9
"""Seconds."""


def describe(record: LogRecord, pace: str = "") -> str:
    """Return a record as a line: epoch, step, loss, pace, other values."""
    numbers = record.numbers
    epoch = numbers.pop("epoch", None)
    parts = [] if epoch is None else [f"epoch {epoch:g}"]
    parts.append(f"step {record.step}" + (f"/{record.num_steps}" if record.num_steps else ""))
    values = {name: f"{name_of(name)} {brief(value)}" for name, value in numbers.items()}
    parts += [values.pop("loss", ""), pace, *values.values()]
    return one_line("  ".join(filter(None, parts)), MAX_LINE)


def describe_values(values: Values) -> str:
    record = values.record
    return "" if record is None else describe(replace(record, metrics=values.metrics))


def pace_in_words(record: LogRecord, speed: float | None) -> str:
    if not speed or (record.num_steps is not None and num_done(record) >= record.num_steps):
        return ""
    left = seconds_left(record, speed)
    rate = f"{brief(float(f'{speed:.2g}'))} steps/s"
    return rate if left is None or left > MAX_LEFT else f"{rate}  {duration(left)} left"


def in_a_line(error: Exception) -> str:
    cause = error.__cause__ if isinstance(error.__cause__, GangError) else error
    kind = "" if isinstance(cause, (GangError, StoppedEarlyError)) else f"{type(cause).__name__}: "
    return kind + one_line(str(cause).partition("\n")[0], MAX_LINE)


PLAIN_INTERVAL = 10.0
"""Seconds between two lines with metrics outside a terminal. A new epoch or a held-out metric is shown at once."""
MAX_HELD = 10_000
"""Lines that wait while a rank's debugger has the terminal. Older lines are dropped."""
MIN_CALL = 1.0
LEVELS = {journal.Restarted: logging.WARNING, journal.Listed: logging.DEBUG}


class Board:
    """Lines on standard error that all gangs' displays share: permanent lines, and a terminal's live lines."""

    output: Screen | None = None
    """Stream of the ranks' output, set by `daskpytorch run`.

    Boards then have no live lines: a pipe to `tee` leads to the same terminal. None: standard error, as for all other
    lines.
    """

    def __init__(self, console: Console | None = None, *, is_quiet: bool = False, is_plain: bool = False) -> None:
        """`is_quiet` shows no metrics, for gangs whose user has not asked for them.

        `is_plain` shows no live lines, which a debugger's prompt would collide with. A notebook gets plain lines.
        """
        screen, is_terminal = cast("IO[str]", Screen()), False if is_plain or self.output is not None else None
        self._console = console or Console(
            file=screen, highlight=False, force_terminal=is_terminal, force_jupyter=False
        )
        self.is_quiet = is_quiet
        self.is_live = self._console.is_terminal and not is_quiet
        self._held: deque[tuple[str, bool]] | None = None
        self._lock = threading.RLock()
        short = Column(no_wrap=True, max_width=self._console.width // 3)  # else a long name takes the loss's place
        name = TextColumn("{task.fields[name]}", style="bold", markup=False, table_column=short)
        text = TextColumn("{task.fields[text]}", markup=False, table_column=Column(no_wrap=True, ratio=1))
        bar = BarColumn(self._console.width // 8)
        self.bars = Progress(name, bar, text, console=self._console, transient=True, expand=True)
        if self.is_live:  # a program may end before its gang, and would leave the terminal without a cursor
            weakref.finalize(self, self.bars.stop)

    def add(self, name: str) -> TaskID | None:
        if not self.is_live:
            return None
        with self._lock:
            if self._held is None:
                self.bars.start()
            return self.bars.add_task("", name=name, text="", total=None)

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
                self._console.print(text, markup=False, emoji=False, soft_wrap=True)
            else:  # rich would replace tabs by spaces
                self._console.file.write(f"{text}\n")
                self._console.file.flush()

    def hold(self, *, is_held: bool) -> None:
        with self._lock:
            held, self._held = self._held or (), deque(maxlen=MAX_HELD) if is_held else None
            for text, is_output in held:
                self.print(text, is_output=is_output)
            if self.is_live:  # without a terminal, rich writes an empty line here
                self.bars.stop()
                if self.bars.tasks and not is_held:
                    self.bars.start()


@dataclass(eq=False)
class Display(View):
    """Lines of one gang on a board."""

    board: Board
    name: str = ""
    mark: str = ""
    _: KW_ONLY
    has_outcome: bool = False
    """Show the start too. A call of `conclude` shows the outcome."""
    unsaid: tuple[type[Exception], ...] = ()
    """Classes of errors that have no line of their own."""
    is_over: bool = False
    _line: TaskID | None = None
    _is_debugging: bool = False
    _shown_at: float = -math.inf
    _epoch: int | None = None

    def on_event(self, event: journal.Event) -> None:
        match event:
            case journal.Placed() | journal.Formed():
                self._show_start(event)
            case journal.Calling() | journal.Called():
                self._show_call(event)
            case journal.Wrote(rank=rank, lines=lines):
                text = "\n".join([f"[{self.mark}rank {rank}] {line}" for line in lines])
                self.board.print(text, is_output=True)
            case journal.Prompted():
                self._hold(event.rank)
            case journal.Logged():
                self._show_record(event.record)
            case journal.Restarted():
                self._close_line()
            case journal.Noted():
                self.board.print(f"{self.mark}{event.line}")
            case journal.Ended():
                self._show_end(event.error)

    def say(self, text: str) -> None:
        self.board.print(f"{self._title}: {text}")

    def conclude(self, how: str, places: Mapping[str, str], advice: str | None = None) -> None:
        self.is_over = True
        values = "" if self.state.stays else describe_values(self.state.values)
        text = f"{how} after {duration(self.state.clock() - self.state.began_at)}{values and f', {values}'}"
        self.say(text if advice is None else f"{text}; {advice}")
        for what, where in places.items():
            self.board.print(f"  {what}: {where}")
        self._show_goodput()

    @property
    def _title(self) -> str:
        call = self.state.call
        return call.rpartition(".")[2] if call is not None else self.name or self.state.title

    def _hold(self, rank: int | None) -> None:
        if self._is_debugging != (rank is not None):
            self._is_debugging = rank is not None
            self.board.hold(is_held=self._is_debugging)

    def _show_start(self, event: journal.Placed | journal.Formed) -> None:
        if isinstance(event, journal.Placed):
            devices = sorted({gpu for node in event.shape.nodes for gpu in node.gpu_names}) or ["CPU"]
            text = f"starting {size_of(event.shape)} ({', '.join(devices)}, {event.shape.backend})"
        else:
            text = f"all ranks have met after {event.seconds:.2f} s"
            self._shown_at = -math.inf  # the first record of an attempt is shown
            self._line = self._line if self._line is not None else self.board.add(self._title)
        if self.has_outcome:
            self.say(text)

    def _show_call(self, event: journal.Calling | journal.Called) -> None:
        self._shown_at, self._epoch = -math.inf, None
        seconds, values = event.time - self.state.called_at, describe_values(self.state.values)
        if isinstance(event, journal.Called) and (event.end.error or values or seconds >= MIN_CALL):
            name = event.name.rpartition(".")[2]
            self.board.print(f"{name}: {event.end.word} after {duration(seconds)}{values and f', {values}'}")
        if self._line is not None:
            text = "idle" if self.state.call is None else ""
            self.board.bars.update(self._line, name=self._title, text=text, completed=0, total=None)

    def _show_record(self, record: LogRecord) -> None:
        if record.rank != 0 or self.board.is_quiet:
            return
        if record.is_evaluation:
            self.say(f"evaluated: {describe(record)}")
            return
        text = describe(record, pace=pace_in_words(record, self.state.rate.per_second))
        if self._line is not None:
            self.board.bars.update(self._line, completed=num_done(record), total=record.num_steps, text=text)
        is_live, is_due = self.board.is_live, time.monotonic() - self._shown_at >= PLAIN_INTERVAL
        is_held_out_known = any(map(is_held_out, self.state.values.numbers))
        is_news = record.epoch not in (None, self._epoch) and not is_held_out_known
        is_news = is_news or any(map(is_held_out, record.numbers))
        self._epoch = record.epoch if record.epoch is not None else self._epoch
        # A terminal shows many models by their live lines alone.
        if not (is_live and self.mark) and (is_news or (is_due and not is_live)):
            self._shown_at = time.monotonic()
            self.say(text)

    def _show_end(self, error: Exception | None) -> None:
        self._close_line()
        if error is not None and not isinstance(error, (*self.unsaid, CancelledError, GangCancelledError)):
            how = {PreemptedError: "", StoppedEarlyError: f"{self._title} was stopped early: "}
            self.board.print(how.get(type(error), f"{self._title or 'the gang'} failed: ") + in_a_line(error))
        if not (self.mark or self.has_outcome):  # the models of a sweep have theirs in the table
            self._show_goodput()

    def _close_line(self) -> None:
        self._hold(None)
        if self._line is not None:
            self.board.remove(self._line)
            self._line = None

    def _show_goodput(self) -> None:
        goodput = self.state.goodput
        if goodput is not None and goodput.total >= MIN_TOTAL and self._title:
            self.say(str(goodput))


class MachineLog(View):
    """Logs each event of a gang as a JSON object, with the gang's id and the attempt's number, from 0."""

    def on_event(self, event: journal.Event) -> None:
        """Log an event, and a rank's output line by line. A line that is this package's own object keeps its fields."""
        match event:
            case journal.Wrote():
                for line in event.lines:
                    said = streams.object_in(line) or {"event": "output", "text": line}
                    level = logging.getLevelNamesMapping().get(str(said.pop("level", "")), logging.INFO)
                    streams.tell(str(said.pop("event")), {**said, **self._about(event.rank)}, level)
            case journal.Prompted() | journal.Accounted():  # the last account comes with the end
                pass
            case journal.Logged():
                self._log(event, logging.INFO if event.record.rank == 0 else logging.DEBUG, event.record.rank)
            case journal.Called() | journal.Ended():
                if isinstance(event, journal.Ended) and self.state.goodput is not None:
                    self._log(journal.Accounted(time=event.time, goodput=self.state.goodput))
                is_stop = event.end.error in ("", StoppedEarlyError.__name__)
                self._log(event, logging.INFO if is_stop else logging.ERROR)
            case journal.Used():
                self._log(event, logging.DEBUG, event.usage.rank)
            case _:
                self._log(event, LEVELS.get(type(event), logging.INFO))

    def say(self, text: str) -> None:
        self._log(journal.Noted(text=text))

    def conclude(self, how: str, places: Mapping[str, str], advice: str | None = None) -> None:
        streams.tell("concluded", {"text": how, "places": dict(places), "advice": advice, **self._about()})

    def _log(self, event: journal.Event, level: int = logging.INFO, rank: int | None = None) -> None:
        fields = journal.fields_of(event)
        streams.tell(fields.pop("event"), {**fields, **self._about(rank)}, level)

    def _about(self, rank: int | None = None) -> dict[str, Any]:
        state = self.state
        gang = state.training.id if state.training is not None else state.name
        about = {"gang": gang or None, "model": state.training and state.training.index, "attempt": state.attempt}
        hosts = state.shape.hosts if state.shape is not None else {}
        return about | ({} if rank is None else {"rank": rank, "host": hosts.get(rank)})


# ---- The display of a gang


def progress(
    name: str, key: str = "", *, is_plain: bool = False, unsaid: tuple[type[Exception], ...] = (Exception,)
) -> Display | MachineLog:
    """Return the observer that shows a gang: JSON objects if `DASKPYTORCH_LOG=json`, else lines for people.

    Gangs that train at the same time share one board. Errors of the classes `unsaid` have no line of their own, by
    default none, since a task raises its error.
    """
    if streams.is_for_machines():
        return MachineLog()
    with _lock:
        other = next((each for each in _gangs if not each.is_over), None)
        board = Board(is_plain=is_plain) if other is None else other.board
        label = name.rpartition(".")[2] if other is None else key or name.rpartition(".")[2]
        mark = "" if other is None else f"{label}, "
        display = Display(board, label, mark, has_outcome=True, unsaid=unsaid)
        _gangs.add(display)
    return display


def echo() -> View:
    return MachineLog() if streams.is_for_machines() else Display(Board(is_quiet=True))


_lock = threading.Lock()
_gangs: weakref.WeakSet[Display] = weakref.WeakSet()
"""New gangs share the board of one that has not ended."""
