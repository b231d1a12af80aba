"""State of one model of a sweep, and the display of all models: lines and tables. Runs in the driver."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from rich.console import Console

from flytekitplugins.daskpytorch.display import notebook
from flytekitplugins.daskpytorch.display.machine import MachineLog
from flytekitplugins.daskpytorch.display.run_state import Logged, RunState, View
from flytekitplugins.daskpytorch.display.terminal import Board, Display
from flytekitplugins.daskpytorch.display.training import count, inputs_of
from flytekitplugins.daskpytorch.driver.futures import GangFuture, GangFutures
from flytekitplugins.daskpytorch.driver.received import ReceivedResults
from flytekitplugins.daskpytorch.errors import StoppedEarlyError
from flytekitplugins.daskpytorch.process import log
from flytekitplugins.daskpytorch.process.streams import one_line, without_secrets
from flytekitplugins.daskpytorch.sweep.storage import KeptModel, ModelStorage

Status = Literal["training", "failed", "finished", "stopped early", "cancelled", "waiting"]
"""State of a model of a `dispatch.map`."""
STATUSES = get_args(Status)
"""All states of a model, in the order in which displays list them."""
MAX_SHOWN = 100
"""Maximum number of characters of an experiment in the `repr` of its `ModelFuture`."""
COUNT_INTERVAL = 5.0
"""Minimum number of seconds between two lines with the number of ended models."""
MAX_LABEL = 48
"""Maximum number of characters of an experiment in its model's line on standard error."""
MAX_ROWS = 100
"""Maximum number of models in the table that a notebook shows of a `dispatch.map`."""


class ModelFuture(Logged, GangFuture):
    """Future of one model of a `dispatch.map`. The result is rank 0's return value.

    For a model that was stopped early, `result` raises `StoppedEarlyError` and `exception` returns that error.
    """

    def __init__(
        self,
        index: int,
        experiment: Any,
        state: RunState,
        cancel: Callable[[], bool],
        end: Callable[[], bool] | None = None,
    ) -> None:
        super().__init__(ReceivedResults(), end)
        self.index = index
        """Index of the experiment, from 0."""
        self.experiment = experiment
        """Argument of the training function. None in a search until the study suggests an experiment."""
        self._run_state = state
        self._cancel = cancel

    @property
    def status(self) -> Status:
        """State of the model's training."""
        if not self.done():
            return "training" if self.running() else "waiting"
        return status_of(error_of(self))

    def __repr__(self) -> str:
        return (
            f"<ModelFuture {self.index}: {self.status}, {one_line(repr(without_secrets(self.experiment)), MAX_SHOWN)}>"
        )

    def cancel(self) -> bool:
        """Cancel the model before or during its training. Return False if the training had already ended."""
        return self._cancel()


@dataclass(eq=False, kw_only=True)
class Model:
    """State of one model of a `dispatch.map`, in the driver."""

    index: int
    line: View
    """Observer that shows the model in the sweep's display."""
    kept: KeptModel | None = None
    """State that an earlier call of `dispatch.map` left in storage. None for a new model."""
    experiment: Any = None
    num_workers: int = 0
    storage: ModelStorage | None = None
    state: RunState = field(init=False)
    future: ModelFuture = field(init=False)
    gang: GangFutures | None = None
    """Futures of the model's gang during training, else None."""

    def __post_init__(self) -> None:
        self.state = RunState(before=self.kept.records if self.kept is not None else ())

    def settle(self, result: Any, error: BaseException | None) -> None:
        """Set the result or the error of the model's future."""
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)


def error_of(future: Future[Any]) -> BaseException | None:
    """Return a future's error, `CancelledError` included, or None if the future has a result."""
    try:
        return future.exception()
    except BaseException as error:  # the future was cancelled
        return error


def status_of(error: BaseException | None) -> Status:
    """Return the final state of a model, from the error of its future. None: the future has a result."""
    match error:
        case None:
            return "finished"
        case StoppedEarlyError():
            return "stopped early"
        case CancelledError():
            return "cancelled"
    return "failed"


# ---- Display


class SweepDisplay:
    """Display of all models of one `dispatch.map` on standard error."""

    def __init__(self, num_models: int, console: Console | None = None, *, is_quiet: bool = False) -> None:
        """Prepare the display.

        Args:
            num_models: Number of models in the sweep.
            console: Console for the lines. None: standard error.
            is_quiet: True to write only outputs, notes and errors, because a notebook's table shows the rest.
        """
        self._board = Board(console, is_quiet=is_quiet)
        self._num_models = num_models
        self._ended: dict[int, Status] = {}
        """Final states of the models that have ended, by index."""
        self._counted_at = time.monotonic()
        self._lock = threading.Lock()

    def line(self, index: int, experiment: object) -> View:
        """Return the observer that displays one model's gang."""
        if log.is_for_machines():
            return MachineLog()
        label = one_line(repr(without_secrets(experiment)), MAX_LABEL)
        return Display(self._board, f"model {index} {label}", f"model {index}, ")

    def restored(self, models: Iterable[ModelFuture], where: str) -> None:
        """Count the models that ended in an earlier call, and write the count with their storage folder `where`."""
        self._ended = {model.index: model.status for model in models}
        self._tell_count(f"before, as {where} has it")

    def count(self, index: int, error: BaseException | None) -> None:
        """Count a model as ended. Write the count from time to time, and after the last model."""
        with self._lock:
            if index in self._ended:
                return
            self._ended[index] = status_of(error)
            now = time.monotonic()
            if len(self._ended) == self._num_models or now - self._counted_at >= COUNT_INTERVAL:
                self._counted_at = now
                self._tell_count("")

    def _tell_count(self, remark: str) -> None:
        each = _in_words(self._ended.values())
        text = f"{len(self._ended)} of {self._num_models} models have ended"
        text += f"{remark and ' '}{remark}{each and ': '}{each}"
        if log.is_for_machines():
            log.say(text, logging.INFO)
        elif not self._board.is_quiet:
            self._board.print(text)


# ---- Tables


def rows_of(models: Iterable[ModelFuture]) -> list[dict[str, Any]]:
    """Return a row for each model: index, status, step, experiment's fields and newest value of each metric.

    If a column of the same name exists, a field has the prefix `experiment.` and a metric the prefix `metric.`.
    """
    rows = []
    for model in models:
        row: dict[str, Any] = {"model": model.index, "status": model.status, "step": model.step}
        for kind, values in (("experiment", inputs_of(model.experiment)), ("metric", model.metrics)):
            row |= {f"{kind}.{name}" if name in row else name: value for name, value in values.items()}
        rows.append(row)
    return rows


def counted(models: Sequence[ModelFuture]) -> str:
    """Return the number of models by status, for example `8 models: 2 training, 5 finished, 1 waiting`."""
    each = _in_words(model.status for model in models)
    return f"{count(len(models), 'model')}{each and ': '}{each}"


def _in_words(statuses: Iterable[Status]) -> str:
    counts = Counter(statuses)
    return ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])


def as_html(models: Sequence[ModelFuture]) -> str:
    """Return an HTML table of models by index, without secrets.

    If there are more than 100 models, those that are training or have failed are preferred.
    """
    chosen = sorted(models, key=lambda model: STATUSES.index(model.status))[:MAX_ROWS]
    rows = rows_of(sorted(chosen, key=lambda model: model.index))
    rest = f"<p>and {len(models) - MAX_ROWS} more</p>" if len(models) > MAX_ROWS else ""
    return f"<p>{counted(models)}</p>{notebook.table_of(rows)}{rest}"


def show_live(models: Sequence[ModelFuture]) -> None:
    """Show a table of the models in a notebook, and update the table in a thread until all models have ended."""
    notebook.LiveTable(functools.partial(as_html, models)).follow(lambda timeout: not wait(models, timeout).not_done)
