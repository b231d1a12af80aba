"""Display of many models in training: a line for each running model, and the number of ended models.

Runs in the driver. A terminal has a live display, any other output plain lines.
"""

import logging
import threading
import time
from dataclasses import dataclass

from rich.console import Console
from rich.progress import TaskID, TextColumn

from flytekitplugins.daskpytorch.context import LogRecord
from flytekitplugins.daskpytorch.display.machine import MachineLog
from flytekitplugins.daskpytorch.display.terminal import MAX_LINE, PLAIN_INTERVAL, bars, describe_record, show, terminal
from flytekitplugins.daskpytorch.errors import StoppedEarlyError
from flytekitplugins.daskpytorch.goodput import Goodput
from flytekitplugins.daskpytorch.process import log
from flytekitplugins.daskpytorch.process.streams import one_line, without_secrets
from flytekitplugins.daskpytorch.protocol.observer import Observer

COUNT_INTERVAL = 5.0
"""Minimum number of seconds between two plain lines with the number of ended models."""
MAX_LABEL = 48
"""Maximum number of characters of an experiment in its line."""
MIN_TOTAL = 1.0
"""Minimum number of seconds of a model's training whose goodput is shown."""


class SweepDisplay:
    """Display of all models of one `dispatch.map` on standard error."""

    def __init__(self, num_models: int, console: Console | None = None, *, is_quiet: bool = False) -> None:
        """Prepare the display.

        Args:
            num_models: Number of models in the sweep.
            console: Console for the lines. None: standard error.
            is_quiet: True to write only outputs, notes and errors, because a notebook's table shows the rest.
        """
        self._console = console or terminal()
        if is_quiet:  # in a notebook, rich makes a separate output of every line
            self._console.is_jupyter = False
        self._is_quiet = is_quiet
        self._num_models = num_models
        self._num_ended = 0
        self._num_early = 0
        self._num_failed = 0
        self._counted_at = time.monotonic()
        self._lock = threading.Lock()
        self.bars = bars(self._console, TextColumn("{task.fields[name]}", markup=False))

    def line(self, index: int, experiment: object) -> Observer:
        """Return the observer of one model's gang."""
        if log.is_for_machines():
            return _MachineLine(self)
        return _Line(self, f"model {index}", one_line(repr(without_secrets(experiment)), MAX_LABEL))

    def restored(self, num_ended: int, num_early: int, where: str) -> None:
        """Count and report the models that ended in an earlier attempt."""
        self._num_ended, self._num_early = num_ended, num_early
        early = f", {num_early} of them early" if num_early else ""
        self.tell(f"{num_ended} of {self._num_models} models have ended before{early}, as {where} has it")

    @property
    def is_live(self) -> bool:
        """True if the display has lines that change."""
        return bool(self._console.is_terminal) and not self._is_quiet and not log.is_for_machines()

    def add(self, label: str) -> TaskID:
        """Add a line for a model whose training begins, and return the line's id."""
        with self._lock:
            self.bars.start()
            return self.bars.add_task("", name=label, text="", total=None)

    def tell(self, text: str) -> None:
        """Write a line, unless the display is quiet because a table shows the same."""
        if not self._is_quiet:
            self.print(text)

    def count(self, error: Exception | None) -> None:
        """Count a model as finished, stopped early or failed."""
        is_early = isinstance(error, StoppedEarlyError)
        with self._lock:
            self._num_ended += 1
            self._num_early += is_early
            self._num_failed += error is not None and not is_early
            is_last = self._num_ended == self._num_models
            if is_last and self.is_live:  # without a live display, rich writes an empty line here
                self.bars.stop()
            if is_last or time.monotonic() - self._counted_at >= COUNT_INTERVAL:
                self._counted_at = time.monotonic()
                early = f", {self._num_early} of them early" if self._num_early else ""
                failed = f", {self._num_failed} of them failed" if self._num_failed else ""
                self.tell(f"{self._num_ended} of {self._num_models} models have ended{early}{failed}")

    def print(self, text: str) -> None:
        """Write a permanent line, or a log record if the log is for machines."""
        if log.is_for_machines():
            log.say(text, logging.INFO)
            return
        self._console.print(text, markup=False, soft_wrap=True)


class _MachineLine(MachineLog):
    def __init__(self, board: SweepDisplay) -> None:
        super().__init__()
        self._board = board

    def ended(self, error: Exception | None) -> None:
        super().ended(error)
        self._board.count(error)


@dataclass(eq=False)
class _Line(Observer):
    _board: SweepDisplay
    _name: str
    _experiment: str
    _task: TaskID | None = None
    _epoch: int = 0
    _shown_at: float = 0.0
    _goodput: Goodput | None = None

    def accounted(self, goodput: Goodput) -> None:
        self._goodput = goodput

    def formed(self, seconds: float) -> None:
        if self._board.is_live and self._task is None:
            self._task = self._board.add(f"{self._name} {self._experiment}")

    def wrote(self, rank: int, lines: list[str]) -> None:
        for line in lines:
            self._board.print(f"[{self._name}, rank {rank}] {line}")

    def noted(self, text: str) -> None:
        self._board.print(f"{self._name}, {text}")

    def logged(self, record: LogRecord) -> None:
        if record.rank != 0:
            return
        if self._task is not None:
            show(self._board.bars, self._task, record)
            return
        epoch, now = record.epoch or 0, time.monotonic()
        if epoch != self._epoch or now - self._shown_at >= PLAIN_INTERVAL:
            self._epoch, self._shown_at = epoch, now
            self._board.tell(f"{self._name} {self._experiment}: {describe_record(record)}")

    def ended(self, error: Exception | None) -> None:
        if self._task is not None:
            self._board.bars.remove_task(self._task)
        if isinstance(error, StoppedEarlyError):
            how = f"was stopped early, after epoch {error.epoch}: {error.metric} {error.value:.4g}"
            self._board.tell(f"{self._name} {self._experiment} {how}")
        elif error is not None:
            how = one_line(str(error).partition("\n")[0], MAX_LINE)
            self._board.print(f"{self._name} {self._experiment} failed: {type(error).__name__}: {how}")
        if self._goodput is not None and self._goodput.total >= MIN_TOTAL:
            self._board.tell(f"{self._name} {self._experiment}: {self._goodput}")
        self._board.count(error)
