"""Many models at once on one cluster: each its own gang on its own share of the workers. Runs in the driver."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, as_completed
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, cast

from distributed import Client

from flytekitplugins.daskpytorch.context import LogRecord
from flytekitplugins.daskpytorch.dask.agents import DaskAgents
from flytekitplugins.daskpytorch.display import wandb as wandb_run
from flytekitplugins.daskpytorch.driver.futures import Futures, GangFuture, GangFutures
from flytekitplugins.daskpytorch.driver.received import ReceivedResults
from flytekitplugins.daskpytorch.driver.request import Request, named, request_for, take_keys
from flytekitplugins.daskpytorch.driver.supervisor import Supervisor
from flytekitplugins.daskpytorch.errors import GangStartError, PreemptedError, StoppedEarlyError, WorkerLostError
from flytekitplugins.daskpytorch.process.streams import one_line, without_secrets
from flytekitplugins.daskpytorch.protocol.code import name_of, pack_code
from flytekitplugins.daskpytorch.protocol.host import current_execution, running
from flytekitplugins.daskpytorch.protocol.observer import Observer
from flytekitplugins.daskpytorch.settings import MODES, EarlyStopping, Gang, Problems, Wandb, is_among, shown
from flytekitplugins.daskpytorch.sweep.display import SweepDisplay
from flytekitplugins.daskpytorch.sweep.halving import Halving
from flytekitplugins.daskpytorch.sweep.packing import Pool
from flytekitplugins.daskpytorch.sweep.table import as_html, counted, is_notebook, rows_of, show_live

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["ModelFuture", "ModelFutures", "train_all"]

LOOK_INTERVAL = 0.5
"""Seconds between looks at the workers while models wait."""
MAX_SHOWN = 100
"""Characters of an experiment in a future's representation."""


def train_all(
    client: Client,
    pytorch_function: Callable[..., Any],
    experiments: Sequence[Any],
    *,
    workers: int | Callable[[Any], int],
    settings: Gang,
    stop_early: EarlyStopping | None,
    wandb: Wandb | None,
) -> ModelFutures:
    """See `dispatch.map`."""
    halving = Halving(stop_early, len(experiments)) if stop_early is not None else None
    sizes = [workers(experiment) if callable(workers) else workers for experiment in experiments]
    cluster = DaskAgents(client)
    _check_sizes(sizes, len(cluster.workers), cluster.scheduler)
    function = name_of(pytorch_function)
    execution = current_execution().name
    runs = wandb_run.sweep_settings(wandb, function=function, execution=execution) if wandb is not None else None
    settings = replace(settings, ranks_per_worker=cluster.ranks_per_worker(settings))
    code, board = pack_code(), SweepDisplay(len(experiments), is_quiet=is_notebook())
    requests = [
        request_for(pytorch_function, (experiment,), {}, _fit(settings, size), code=code)
        for experiment, size in zip(experiments, sizes, strict=True)
    ]
    names = take_keys(pytorch_function, settings.key, [f"-{index}" for index in range(len(experiments))])
    models = []
    for index, (experiment, size) in enumerate(zip(experiments, sizes, strict=True)):
        request = named(requests[index], names[index])
        if runs is not None:
            run = wandb_run.model_settings(runs, index=index, key=request.key)
            observer = wandb_run.WandbObserver(run, wandb_run.inputs_of(experiment))
            request = replace(request, observers=[*request.observers, observer])
        line = board.line(index, experiment)
        models.append(_Model(index=index, experiment=experiment, num_workers=size, request=request, line=line))
    futures = ModelFutures(cluster, models, settings.start_timeout, halving)
    if is_notebook():
        show_live(futures, lambda: as_html(futures))
    return futures


class ModelFuture(GangFuture):
    """The future of one model: rank 0's return value.

    Where the model was stopped early, `result` raises `StoppedEarlyError` and `exception` returns it.
    """

    def __init__(self, index: int, experiment: Any, log: _Log, cancel: Callable[[], bool]) -> None:
        super().__init__(ReceivedResults())
        self.index = index
        """The experiment's place among all."""
        self.experiment = experiment
        """What the model was trained with."""
        self._log = log
        self._cancel = cancel

    @property
    def records(self) -> list[LogRecord]:
        """What rank 0 has logged so far: its numbers and strings; after a restart, without what will come again."""
        return list(self._log.records)

    @property
    def metrics(self) -> Mapping[str, Any]:
        """The newest value of each metric in `records`."""
        return dict(self._log.newest)

    @property
    def step(self) -> int | None:
        """That of the last of `records`; None where there is none."""
        records = self._log.records
        return records[-1].step if records else None

    @property
    def status(self) -> Literal["waiting", "training", "finished", "stopped early", "failed", "cancelled"]:
        """How it stands with the model."""
        if not self.done():
            return "training" if self.running() else "waiting"
        match _error_of(self):
            case None:
                return "finished"
            case StoppedEarlyError():
                return "stopped early"
            case CancelledError():
                return "cancelled"
        return "failed"

    def __repr__(self) -> str:
        return (
            f"<ModelFuture {self.index}: {self.status}, {one_line(repr(without_secrets(self.experiment)), MAX_SHOWN)}>"
        )

    def cancel(self) -> bool:
        """Do not train the model, or end its training; False where that was over before."""
        return self._cancel()


class _Log(Observer):
    def __init__(self) -> None:
        self.records: list[LogRecord] = []
        self.newest: dict[str, Any] = {}
        """Of each metric."""

    def logged(self, record: LogRecord) -> None:
        if record.rank == 0:
            self.records.append(record)
            self.newest = {**self.newest, **record.metrics}  # another, since others read it meanwhile

    def restarting(self, reason: str, step: int | None) -> None:
        self.records = [record for record in self.records if step is not None and record.step <= step]
        self.newest = {name: value for record in self.records for name, value in record.metrics.items()}


@dataclass(eq=False, kw_only=True)
class _Model:
    index: int
    experiment: Any
    num_workers: int
    request: Request
    line: Observer
    """Of the sweep display."""
    log: _Log = field(default_factory=_Log)
    future: ModelFuture = field(init=False)
    gang: GangFutures | None = None
    """While it is being trained."""


class ModelFutures(Futures[ModelFuture]):
    """One future per experiment, in their order. Each is settled when its model's training ends."""

    def __init__(
        self,
        cluster: DaskAgents,
        models: Sequence[_Model],
        start_timeout: float,
        halving: Halving | None = None,
    ) -> None:
        self.cluster = cluster
        """All the workers."""
        self._start_timeout = start_timeout
        self._halving = halving
        self._changed = threading.Condition()
        """Guards all that follows."""
        self._pool = Pool(free=set(cluster.workers))
        self._waiting = sorted(models, key=lambda model: -model.num_workers)
        self._preempted: str | None = None
        self._enough_at = time.monotonic()
        """When the cluster last had enough workers for each of the waiting models."""
        for model in models:
            cancel = functools.partial(self._cancel, model)
            model.future = ModelFuture(model.index, model.experiment, model.log, cancel)
        self._futures = [model.future for model in models]
        running.add(self)
        threading.Thread(target=self._serve, name="daskpytorch-many", daemon=True).start()

    def result(self, timeout: float | None = None, *, return_exceptions: bool = False) -> list[Any]:
        """Every model's result, in the order of the experiments; waits for all of them.

        A model that was stopped early has None in its place.

        Args:
            timeout: Seconds to wait; None: until all have ended.
            return_exceptions: As `asyncio.gather` has it: raise none of the models' errors, but have each in the place
                of its result, that of a model that was stopped early or cancelled included.

        Raises:
            TimeoutError: Not all have ended within `timeout` seconds; they go on.
            Exception: The first failed experiment's, once all have ended.
        """
        self._wait(timeout)
        if return_exceptions:
            errors = map(_error_of, self._futures)
            return [
                future.result() if error is None else error for future, error in zip(self._futures, errors, strict=True)
            ]
        return [None if _was_stopped_early(future) else future.result() for future in self._futures]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error that `result` would raise, or None. That a model was stopped early is none."""
        self._wait(timeout)
        failed = (future for future in self._futures if not _was_stopped_early(future))
        return next((error for future in failed if (error := _error_of(future)) is not None), None)

    def best(self, metric: str, mode: Literal["min", "max"] = "min", timeout: float | None = None) -> ModelFuture:
        """The finished model whose newest value of a metric is the best; waits for all, whether they fail or not.

        Models that were stopped early, have failed or were cancelled do not count, nor do values that are no number.

        Args:
            metric: A name that rank 0 has given to `log`.
            mode: Whether low or high values are good.
            timeout: Seconds to wait; None: until all have ended.

        Raises:
            TimeoutError: Not all have ended within `timeout` seconds; they go on.
            ValueError: `mode` is neither, or no finished model has logged a number of that name.
        """
        problems = Problems("best", SimpleNamespace(mode=mode))
        problems.unless(is_among(mode, MODES), "mode", f"one of {', '.join(MODES)}")
        problems.raise_any()
        self._wait(timeout)
        finished = [future for future in self._futures if future.status == "finished"]
        values = {future: _number(future.metrics.get(metric)) for future in finished}
        if not (numbers := {future: value for future, value in values.items() if not math.isnan(value)}):
            names = ", ".join(sorted({name for future in finished for name in future.metrics})) or "nothing"
            raise ValueError(
                f"best(metric={shown(metric)}): no finished model has logged a number of that name. "
                f"There are {counted(self)}; the finished ones have logged: {names}"
            )
        return (min if mode == "min" else max)(numbers, key=numbers.__getitem__)

    def to_frame(self) -> pd.DataFrame:
        """How it stands now, as a table with a row for each model, by its index.

        Its columns are `status` and `step`, the fields of the experiments (a dictionary's items, those of a dataclass
        or named tuple, else `experiment`), and the newest value of each metric. A field that is called like a column
        before it has `experiment.` before its name, a metric `metric.`.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError(
                'to_frame() needs pandas, which is not installed here: pip install "flytekitplugins-daskpytorch[sweep]"'
            ) from error
        rows = rows_of(self._futures)
        return pd.DataFrame(rows, index=pd.Index(range(len(rows)), name="model")).drop(columns="model", errors="ignore")

    def __repr__(self) -> str:
        return f"<ModelFutures: {counted(self)}>"

    def _repr_html_(self) -> str:
        return as_html(self)

    def as_completed(self, timeout: float | None = None) -> Iterator[ModelFuture]:
        """The futures, each as soon as its model's training has ended."""
        return cast("Iterator[ModelFuture]", as_completed(self._futures, timeout))

    def cancel(self) -> bool:
        """Cancel all that have not ended; False where all had."""
        has_cancelled = [future.cancel() for future in reversed(self._futures)]  # the waiting ones must not start
        return any(has_cancelled)

    def preempt(self, reason: str) -> None:
        """Start no more models; those that are being trained hear of it themselves."""
        self._preempted = reason

    def _wait(self, timeout: float | None) -> None:
        for _ in as_completed(self._futures, timeout):
            pass

    # ---- in the thread that starts the gangs

    def _serve(self) -> None:
        try:
            self._start_all()
        except Exception as error:  # nobody shall wait for models that nobody starts
            with self._changed:
                self._give_up(self._waiting, error)
        finally:
            running.discard(self)

    def _start_all(self) -> None:
        look_at = time.monotonic() + LOOK_INTERVAL
        while self._waiting:
            with self._changed:
                self._start_what_fits()
                self._changed.wait(max(0.0, look_at - time.monotonic()))
            if time.monotonic() >= look_at:
                self._look()
                look_at = time.monotonic() + LOOK_INTERVAL

    def _start_what_fits(self) -> None:
        for model in list(self._waiting) if self._preempted is None else ():
            if self._pool.num_free == 0:
                return
            if (workers := self._pool.acquire(model, model.num_workers)) is not None:
                self._start(model, workers)
                self._waiting.remove(model)

    def _start(self, model: _Model, workers: Sequence[str]) -> None:
        share = _Share(self, model, workers)
        world_size = model.num_workers * model.request.ranks_per_worker
        observers = [model.line, model.log]
        if self._halving is not None:
            observers.append(self._halving.judge(model.index, model.line.noted))
        supervisor = Supervisor(model.request, share, observers, received=model.future.received)
        model.future.set_running_or_notify_cancel()
        model.gang = GangFutures(supervisor, world_size)
        model.gang[0].add_done_callback(lambda _: self._end(model))

    def _look(self) -> None:
        try:
            present: Sequence[str] | None = self.cluster.present()
        except (OSError, TimeoutError):  # gangs notice the loss of a scheduler by themselves
            present = None
        with self._changed:
            if self._preempted is not None:
                text = f"the model was not trained: {self._preempted}"
                self._give_up(self._waiting, PreemptedError(text, cause=self._preempted))
            elif present is not None:
                self._pool.update(present)
                self._give_up_the_too_large()
            elif not self._pool.is_in_use:
                self._give_up(self._waiting, WorkerLostError("the model was not trained: the Dask scheduler was lost"))

    def _give_up_the_too_large(self) -> None:
        too_large = [model for model in self._waiting if model.num_workers > self._pool.num_workers]
        now = time.monotonic()
        if not too_large:
            self._enough_at = now
        elif now - self._enough_at >= self._start_timeout:
            wanted, there = max(model.num_workers for model in too_large), self._pool.num_workers
            text = f"{there} workers are left for a model that takes {wanted}, and no others came within "
            self._give_up(too_large, GangStartError(f"{text}{self._start_timeout:g} s"))

    def _give_up(self, models: Sequence[_Model], error: Exception) -> None:
        for model in list(models):
            self._waiting.remove(model)
            model.future.set_running_or_notify_cancel()
            model.future.set_exception(error)
            model.line.ended(error)

    # ---- in other threads

    def refill(self, model: _Model) -> list[str]:
        """A gang's workers, after it was given free ones for those that it has lost.

        Raises:
            OSError: The scheduler does not answer.
        """
        present = self.cluster.present()
        with self._changed:
            self._pool.update(present)
            return self._pool.refill(model)

    def _end(self, model: _Model) -> None:
        gang, model.gang = model.gang, None
        with self._changed:
            self._pool.release(model)
            self._changed.notify_all()
        if gang is None:
            return
        if (error := gang[0].exception()) is None:
            model.future.set_result(gang[0].result())
        else:
            if not isinstance(error, StoppedEarlyError):  # which says it itself
                error.add_note(f"in experiment {model.index} of {len(self)}")
            model.future.set_exception(error)

    def _cancel(self, model: _Model) -> bool:
        with self._changed:
            if model in self._waiting:
                self._waiting.remove(model)
                Future.cancel(model.future)
                model.future.set_running_or_notify_cancel()
                model.line.ended(CancelledError("cancelled"))
                return True
            gang = model.gang
        return gang.cancel() if gang is not None else model.future.cancelled()


class _Share(DaskAgents):
    """Starts one gang's agents on the workers that it was given, and on others that it is given for lost ones."""

    def __init__(self, models: ModelFutures, model: _Model, workers: Sequence[str]) -> None:
        vars(self).update(vars(models.cluster))
        self._futures = []  # it closes only what it has launched
        self._models = models
        self._model = model
        self.workers = workers
        self.num_wanted = len(workers)

    def present(self) -> list[str]:
        """The gang's workers, the replacements of those that have gone among them."""
        return self._models.refill(self._model)


def _fit(settings: Gang, num_workers: int) -> Gang:
    least = settings.min_workers
    return settings if least is None or least <= num_workers else replace(settings, min_workers=num_workers)


def _check_sizes(sizes: Sequence[Any], num_workers: int, scheduler: str) -> None:
    for index, size in enumerate(sizes):
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"experiment {index} takes workers={shown(size)}: must be a whole number from 1 up")
    if max(sizes, default=0) > num_workers:
        raise GangStartError(
            f"experiment {sizes.index(max(sizes))} takes {max(sizes)} workers; the cluster at {scheduler} has "
            f"{num_workers}. Start workers, or wait for them with client.wait_for_workers(n)."
        )


def _number(value: object) -> float:
    """As a float; what is none is NaN."""
    try:
        return float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:
        return math.nan


def _was_stopped_early(future: Future[Any]) -> bool:
    return isinstance(_error_of(future), StoppedEarlyError)


def _error_of(future: Future[Any]) -> BaseException | None:
    try:
        return future.exception()
    except BaseException as error:  # cancelled
        return error
