"""Futures and scheduling of many models on one cluster, each with a gang and a share of workers. Runs in the driver."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, wait
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

from flytekitplugins.daskpytorch.checks import MODE, Problems, check_direction, direction_of, require_extra, shown
from flytekitplugins.daskpytorch.dask.agents import Allotment
from flytekitplugins.daskpytorch.driver.futures import Futures, GangFutures
from flytekitplugins.daskpytorch.driver.request import Request
from flytekitplugins.daskpytorch.driver.storage import keys
from flytekitplugins.daskpytorch.driver.supervisor import Supervisor
from flytekitplugins.daskpytorch.errors import GangStartError, PreemptedError, StoppedEarlyError, WorkerLostError
from flytekitplugins.daskpytorch.process.ending import deferred
from flytekitplugins.daskpytorch.protocol import journal
from flytekitplugins.daskpytorch.protocol.failure import raisable
from flytekitplugins.daskpytorch.protocol.host import running
from flytekitplugins.daskpytorch.sweep.early_stopping import Judge
from flytekitplugins.daskpytorch.sweep.sweep import Model, ModelFuture, Sweep, counted, error_of, rows_of

if TYPE_CHECKING:
    import pandas as pd

STOPPED_EARLY = "stopped early"
LOOK_INTERVAL = 0.5


def train_all(sweep: Sweep) -> ModelFutures:
    storage = sweep.storage
    sizes = [sweep.size(*each) for each in enumerate(sweep.experiments)]  # checked before experiments are pickled
    kept = storage.open(sweep.function, sweep.experiments) if storage is not None else {}
    models = [sweep.model(index, size, kept.get(index)) for index, size in enumerate(sizes)]
    suffixes = [f"-{index}" for index in range(len(models))]
    sweep.keys = keys.take(sweep.function, sweep.settings.key, suffixes, sweep.execution.task)
    return ModelFutures(sweep, models)


class ModelFutures(Futures[ModelFuture]):
    """Futures of many models, in the order of the experiments, each settled when its model's training ends."""

    def __init__(self, sweep: Sweep, models: Sequence[Model]) -> None:
        self.cluster = sweep.cluster
        self._sweep = sweep
        self._changed = threading.Condition()
        self._allotment = Allotment(sweep.cluster.workers)
        missing = [model for model in models if not sweep.is_over(model)]
        self._waiting = sorted(missing, key=lambda model: -model.num_workers)
        self._preempted: str | None = None
        self._enough_at = time.monotonic()
        for model in models:
            model.future = ModelFuture(model, functools.partial(self._cancel, model), self._end_all)
            if model not in missing:
                self._restore(model)
        self._futures = [model.future for model in models]
        if sweep.storage is not None and any(model.kept for model in models):
            sweep.board.restored([model.future for model in models if model not in missing], sweep.storage.folder)
        running.add(self)
        threading.Thread(target=self._serve, name="daskpytorch-many", daemon=True).start()

    def result(self, timeout: float | None = None, *, return_exceptions: bool = False) -> list[Any]:
        """Wait for all models, and return their results in the order of the experiments.

        The result of a model that was stopped early is None.

        Args:
            timeout: Seconds to wait. None: no limit.
            return_exceptions: True to return errors in the list in place of results, early stopping and cancellation
                included. False to raise the first error.

        Raises:
            TimeoutError: Some models have not ended within `timeout` seconds. Their training goes on.
            Exception: Error of the first failed experiment, once all models have ended.
        """
        self._wait(timeout)
        if return_exceptions:
            return [future.result() if (error := error_of(future)) is None else error for future in self._futures]
        return [None if future.status == STOPPED_EARLY else future.result() for future in self._futures]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for all models, and return the error that `result` would raise, or None."""
        self._wait(timeout)
        failed = (future for future in self._futures if future.status != STOPPED_EARLY)
        return next((error for future in failed if (error := error_of(future)) is not None), None)

    def best(self, metric: str, mode: Literal["min", "max"] | None = None, timeout: float | None = None) -> ModelFuture:
        """Wait for all models, and return the future of the finished model with the best newest value of a metric.

        Failed, cancelled and early stopped models do not count. Neither do values other than numbers.

        Args:
            metric: Name of a metric that rank 0 has logged.
            mode: `min` if low values are good, `max` if high values are good. None: by the words of the name, as in
                `Keep`.
            timeout: Seconds to wait. None: no limit.

        Raises:
            TimeoutError: Some models have not ended within `timeout` seconds. Their training goes on.
            ValueError: `mode` has another value, or is None and the name does not tell, or no finished model has logged
                a number of that name.
        """
        problems = Problems("best", SimpleNamespace(metric=metric, mode=mode), {"mode": MODE})
        check_direction(problems, metric, mode)
        problems.raise_any()
        self._wait(timeout)
        finished = [future for future in self._futures if future.status == "finished"]
        values = {future: future.metrics.get(metric) for future in finished}
        if not (numbers := {future: value for future, value in values.items() if _is_number(value)}):
            names = ", ".join(sorted({name for future in finished for name in future.metrics})) or "nothing"
            raise ValueError(
                f"best(metric={shown(metric)}): no finished model has logged a number of that name. "
                f"There are {counted(self)}; the finished ones have logged: {names}"
            )
        return (min if (mode or direction_of(metric)) == "min" else max)(numbers, key=numbers.__getitem__)

    def to_frame(self) -> pd.DataFrame:
        """Return the present state as a table with a row for each model, by index.

        Columns are `status`, `step`, the experiments' fields, and each metric's newest value. A dictionary, dataclass,
        named tuple or Pydantic model has a column for each field. Any other experiment is in the column `experiment`.
        If a column of the same name exists, a field has the prefix `experiment.` and a metric the prefix `metric.`.

        Raises:
            ImportError: The extra `sweep` is not installed.
        """
        require_extra("sweep", "to_frame()")
        import pandas as pd

        rows = rows_of(self._futures)
        return pd.DataFrame(rows, index=pd.Index(range(len(rows)), name="model")).drop(columns="model", errors="ignore")

    def __repr__(self) -> str:
        return f"<ModelFutures: {counted(self)}>"

    def cancel(self) -> bool:
        has_cancelled = [future.cancel() for future in reversed(self._futures)]  # waiting models must not start
        return any(has_cancelled)

    def preempt(self, reason: str) -> None:
        self._preempted = reason

    def _wait(self, timeout: float | None) -> None:
        with deferred(self._end_all) as is_ending:
            not_done = wait(self._futures, timeout).not_done
            if is_ending():
                wait(self._futures)
            elif not_done:
                raise TimeoutError(
                    f"{len(not_done)} of {len(self)} models have not ended within {timeout:g} s. Their training goes "
                    "on: wait again, or cancel() them"
                )

    def _end_all(self) -> bool:
        """Cancel all gangs at Ctrl-C, before the caller closes their Dask client.

        Return True, so that `KeyboardInterrupt` is raised after their end.
        """
        self.cancel()
        return True

    def _restore(self, model: Model) -> None:
        if (kept := model.kept) is not None:
            if (rungs := self._sweep.rungs) is not None:
                Judge(rungs, model.index, model.line.note, kept.records).take_before()
            model.state.cut(kept.records)
            model.future.set_running_or_notify_cancel()
            model.settle(kept.result, kept.stopped)

    # ---- in the thread that starts the gangs

    def _serve(self) -> None:
        try:
            self._start_all()
        except BaseException as error:  # settles the futures of models that will never start
            with self._changed:
                self._give_up(self._waiting, raisable(error, "starting the models"))
        finally:
            running.discard(self)

    def _start_all(self) -> None:
        look_at = time.monotonic() + LOOK_INTERVAL
        while self._waiting:
            with self._changed:
                self._start_what_fits()
            with self._changed:
                self._changed.wait(max(0.0, look_at - time.monotonic()))
            if time.monotonic() >= look_at:
                self._look()
                look_at = time.monotonic() + LOOK_INTERVAL

    def _start_what_fits(self) -> None:
        for model in [model for model in self._waiting if self._preempted is None]:
            if self._allotment.num_free == 0:
                return
            if (workers := self._allotment.acquire(model, model.num_workers)) is not None:
                try:
                    request = self._sweep.request(model)
                except Exception as error:  # fails this experiment alone, which was changed since the call
                    self._allotment.release(model)
                    error.add_note(self._place_of(model))
                    self._give_up([model], error)
                else:
                    self._waiting.remove(model)
                    self._start(model, request, workers)

    def _start(self, model: Model, request: Request, workers: Sequence[str]) -> None:
        launcher = self.cluster.share(workers, functools.partial(self._refill, model))
        world_size = model.num_workers * request.ranks_per_worker
        observers = self._sweep.observers(model, request.observers)
        supervisor = Supervisor(replace(request, observers=observers), launcher, model.future.received)
        model.future.set_running_or_notify_cancel()
        model.gang = GangFutures(supervisor, world_size)
        model.gang[0].add_done_callback(lambda rank_0: self._end(model, rank_0))

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
                self._allotment.update(present)
                self._give_up_the_too_large()
            elif not self._allotment.has_holders:
                text = "the model was not trained: the Dask scheduler was lost. See its log"
                self._give_up(self._waiting, WorkerLostError(text))

    def _give_up_the_too_large(self) -> None:
        too_large = [model for model in self._waiting if model.num_workers > len(self._allotment.workers)]
        now = time.monotonic()
        if not too_large:
            self._enough_at = now
        elif now - self._enough_at >= self._sweep.settings.start_timeout:
            wanted, there = max(model.num_workers for model in too_large), len(self._allotment.workers)
            text = f"{there} workers are left for a model that takes {wanted}, and no others came within "
            text += f"{self._sweep.settings.start_timeout:g} s. Start more, or raise Gang(start_timeout=...)"
            self._give_up(too_large, GangStartError(text))

    def _give_up(self, models: Sequence[Model], error: Exception) -> None:
        for model in list(models):
            self._waiting.remove(model)
            model.line.on_event(journal.Ended.by(error))
            self._sweep.board.count(model.index, error)
            if model.future.set_running_or_notify_cancel():
                model.future.set_exception(error)

    # ---- in other threads

    def _refill(self, model: Model) -> list[str]:
        """Raises `OSError` if the Dask scheduler does not answer."""
        present = self.cluster.present()
        with self._changed:
            self._allotment.update(present)
            return self._allotment.refill(model)

    def _end(self, model: Model, rank_0: Future[Any]) -> None:
        model.gang = None
        error = error_of(rank_0)
        result = rank_0.result() if error is None else None
        try:
            self._note_end(model, error, result)
        finally:
            model.settle(result, error)

    def _note_end(self, model: Model, error: BaseException | None, result: Any) -> None:
        self._sweep.board.count(model.index, error)
        with self._changed:
            self._allotment.release(model)
            self._changed.notify_all()
        if model.storage is not None:
            model.storage.note_end(result, error, model.line.note)
        if error is not None and not isinstance(error, StoppedEarlyError):  # its message names the experiment
            error.add_note(self._place_of(model))

    def _place_of(self, model: Model) -> str:
        return f"in experiment {model.index} of {len(self)}"

    def _cancel(self, model: Model) -> bool:
        with self._changed:
            if model in self._waiting:
                Future.cancel(model.future)
                self._give_up([model], CancelledError("cancelled"))
                return True
            gang = model.gang
        return gang.cancel() if gang is not None else model.future.cancelled()


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int) or (isinstance(value, float) and not math.isnan(value))
