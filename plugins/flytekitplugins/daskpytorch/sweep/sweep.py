"""One `dispatch.map`: what its models share, the preparation of each model, their workers and their display.

Runs in the driver. A gang gets all its workers or none, and larger gangs go first. An ended gang's workers are enough
for the next gang of the same size, so large gangs never starve, although small gangs fill every gap.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

from rich.console import Console

from flytekitplugins.daskpytorch.checks import shown
from flytekitplugins.daskpytorch.dask.agents import HOW_TO_GET_WORKERS, DaskAgents
from flytekitplugins.daskpytorch.display import training
from flytekitplugins.daskpytorch.display import wandb as wandb_run
from flytekitplugins.daskpytorch.display.journal_file import journal_in
from flytekitplugins.daskpytorch.display.run_state import Logged, RunState, View, watched
from flytekitplugins.daskpytorch.display.terminal import Board, Display, MachineLog
from flytekitplugins.daskpytorch.display.training import count, inputs_of, row_of
from flytekitplugins.daskpytorch.driver.futures import GangFuture, GangFutures
from flytekitplugins.daskpytorch.driver.received import ReceivedResults
from flytekitplugins.daskpytorch.driver.request import Request, request_for
from flytekitplugins.daskpytorch.driver.storage import storage_of
from flytekitplugins.daskpytorch.errors import GangStartError
from flytekitplugins.daskpytorch.process import streams
from flytekitplugins.daskpytorch.process.streams import one_line, without_secrets
from flytekitplugins.daskpytorch.protocol.code import Code, pack_code
from flytekitplugins.daskpytorch.protocol.function import pack_call
from flytekitplugins.daskpytorch.protocol.host import Execution, current_execution
from flytekitplugins.daskpytorch.protocol.journal import End
from flytekitplugins.daskpytorch.protocol.observer import Observer
from flytekitplugins.daskpytorch.settings import EarlyStopping, Gang, Wandb
from flytekitplugins.daskpytorch.sweep.early_stopping import Judge, Rungs
from flytekitplugins.daskpytorch.sweep.storage import KeptModel, ModelStorage, SweepStorage


@dataclass(eq=False, kw_only=True)
class Sweep:
    cluster: DaskAgents
    function: Callable[..., Any]
    experiments: Sequence[Any]
    workers: int | Callable[[Any], int]
    settings: Gang
    stop_early: EarlyStopping | None
    wandb: Wandb | None
    storage: SweepStorage | None
    keys: Sequence[str] = ()
    """By index. A key names the model's checkpoints and tracker runs in all attempts."""
    execution: Execution = field(default_factory=current_execution)
    """Execution of the thread that calls `dispatch.map`. Other threads may have none."""
    code: Code = field(default_factory=pack_code)

    def __post_init__(self) -> None:
        num_models = len(self.experiments)
        self.rungs = Rungs(self.stop_early, num_models) if self.stop_early is not None else None
        self.board = SweepDisplay(num_models)
        self.variables: Mapping[str, str] = {} if self.wandb is None else wandb_run.variables_of(self.wandb)
        self.settings = replace(self.settings, ranks_per_worker=self.cluster.ranks_per_worker(self.settings))

    def model(self, index: int, num_workers: int, kept: KeptModel | None) -> Model:
        experiment = self.experiments[index]
        line = self.board.line(index, experiment)
        model = Model(index=index, experiment=experiment, num_workers=num_workers, line=line, kept=kept)
        if self.storage is not None:
            model.storage = self.storage.model(index, lambda: self._about(model))
        if not self.is_over(model):
            pack_call(self.function, (experiment,), {})
        return model

    def size(self, index: int, experiment: Any) -> int:
        """Return the number of workers for an experiment.

        Raises `ValueError` unless that is a whole number above 0, and `GangStartError` if the cluster has fewer.
        """
        size = self.workers(experiment) if callable(self.workers) else self.workers
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"experiment {index} takes workers={shown(size)}: must be a whole number from 1 up")
        if size > (there := len(self.cluster.workers)):
            raise GangStartError(
                f"experiment {index} takes {size} workers; the cluster at {self.cluster.scheduler} has {there}. "
                f"{HOW_TO_GET_WORKERS}"
            )
        return size

    def request(self, model: Model) -> Request:
        """Return the request for a model's gang.

        Call only when the gang starts, since a request holds the call's large arguments. Raises if the experiment can
        no longer be pickled, or an observer cannot be made.
        """
        settings, key = _fit(self.settings, model.num_workers), self.keys[model.index]
        paths = storage_of(
            self.execution, key, self.settings, model.storage.paths if model.storage is not None else None
        )
        request = request_for(
            self.function, (model.experiment,), {}, settings, code=self.code, execution=self.execution
        )
        observers = [*request.observers]
        if self.wandb is not None:
            observers.append(wandb_run.WandbObserver(self.wandb, self.variables, self.execution.name))
        about = training.of_model(self.function, self._group, model.index, model.experiment)
        return replace(request, key=key, storage=paths, observers=observers, training=about)

    def observers(self, model: Model, asked: Sequence[Observer]) -> list[Observer]:
        observers: list[Observer] = [model.line]
        if self.rungs is not None:
            before = model.kept.records if model.kept is not None else ()
            observers.append(Judge(self.rungs, model.index, model.line.note, before))
        return watched(model.state, [*observers, *journal_in(None), *asked])

    def is_over(self, model: Model) -> bool:
        """Return True if an earlier call with the same storage has completed the model.

        An early stopped model counts as incomplete in a call without early stopping.
        """
        kept = model.kept
        return kept is not None and kept.has_ended and (kept.stopped is None or self.rungs is not None)

    @cached_property
    def _group(self) -> str:
        return training.group_of(self.keys[0].removesuffix("-0"), self.execution)

    def _about(self, model: Model) -> dict[str, Any]:
        return {"experiment": model.experiment, "records": list(model.state.records)}


def _fit(settings: Gang, num_workers: int) -> Gang:
    least = settings.min_workers
    return settings if least is None or least <= num_workers else replace(settings, min_workers=num_workers)


# ---- The models and their display

Status = Literal["training", "failed", "finished", "stopped early", "cancelled", "waiting"]
STATUSES = get_args(Status)
STATUS_OF: Mapping[str, Status] = {"done": "finished", "stopped early": "stopped early", "cancelled": "cancelled"}
"""By the word of a gang's end. Other ends: failed."""
MAX_SHOWN = 100
COUNT_INTERVAL = 5.0
MAX_LABEL = 48


class ModelFuture(Logged, GangFuture):
    """Future of one model of a `dispatch.map`. The result is rank 0's return value.

    For a model that was stopped early, `result` raises `StoppedEarlyError` and `exception` returns that error.
    """

    def __init__(self, model: Model, cancel: Callable[[], bool], end: Callable[[], bool] | None = None) -> None:
        super().__init__(ReceivedResults(), end)
        self.index = model.index
        """Index of the experiment, from 0."""
        self.experiment = model.experiment
        """Argument of the training function."""
        self._run_state = model.state
        self._cancel = cancel

    @property
    def status(self) -> Status:
        """State of the model's training."""
        if not self.done():
            return "training" if self.running() else "waiting"
        return status_of(error_of(self))

    def __repr__(self) -> str:
        return f"<ModelFuture {self.index}: {self.status}, {_label(self.experiment, MAX_SHOWN)}>"

    def cancel(self) -> bool:
        """Cancel the model before or during its training. Return False if the training had already ended."""
        return self._cancel()


@dataclass(eq=False, kw_only=True)
class Model:
    index: int
    line: View
    kept: KeptModel | None = None
    experiment: Any
    num_workers: int
    storage: ModelStorage | None = None
    state: RunState = field(init=False)
    future: ModelFuture = field(init=False)
    gang: GangFutures | None = None

    def __post_init__(self) -> None:
        self.state = RunState(before=self.kept.records if self.kept is not None else ())

    def settle(self, result: Any, error: BaseException | None) -> None:
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)


def error_of(future: Future[Any]) -> BaseException | None:
    try:
        return future.exception()
    except BaseException as error:  # the future was cancelled
        return error


def _label(experiment: object, max_length: int) -> str:
    return one_line(repr(without_secrets(experiment)), max_length)


def status_of(error: BaseException | None) -> Status:
    return STATUS_OF.get(End.of(error).word, "failed")


# ---- Display


class SweepDisplay:
    def __init__(self, num_models: int, console: Console | None = None) -> None:
        self._board = Board(console)
        self._num_models = num_models
        self._ended: dict[int, Status] = {}
        self._counted_at = time.monotonic()
        self._lock = threading.Lock()

    def line(self, index: int, experiment: object) -> View:
        if streams.is_for_machines():
            return MachineLog()
        return Display(self._board, f"model {index} {_label(experiment, MAX_LABEL)}", f"model {index}, ")

    def restored(self, models: Iterable[ModelFuture], where: str) -> None:
        self._ended = {model.index: model.status for model in models}
        self._tell_count(f" before, as {where} has it")

    def count(self, index: int, error: BaseException | None) -> None:
        with self._lock:
            self._ended[index] = status_of(error)
            now = time.monotonic()
            if len(self._ended) == self._num_models or now - self._counted_at >= COUNT_INTERVAL:
                self._counted_at = now
                self._tell_count("")

    def _tell_count(self, remark: str) -> None:
        text = f"{len(self._ended)} of {self._num_models} models have ended{remark}{_in_words(self._ended.values())}"
        if streams.is_for_machines():
            streams.say(text, logging.INFO)
        else:
            self._board.print(text)


# ---- Tables


def rows_of(models: Iterable[ModelFuture]) -> list[dict[str, Any]]:
    rows = []
    for model in models:
        row = {"model": model.index, "status": model.status, "step": model.step}
        rows.append(row_of(row, experiment=inputs_of(model.experiment), metric=model.metrics))
    return rows


def counted(models: Sequence[ModelFuture]) -> str:
    return f"{count(len(models), 'model')}{_in_words(model.status for model in models)}"


def _in_words(statuses: Iterable[Status]) -> str:
    counts = Counter(statuses)
    words = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])
    return words and f": {words}"
