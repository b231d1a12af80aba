"""Experiments that an Optuna study suggests, each when it is needed, and what the study hears of them.

Runs in the driver. Each gang's reporter hears of its records on the thread of that gang's supervisor.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flytekitplugins.daskpytorch.context import LogRecord
from flytekitplugins.daskpytorch.errors import StoppedEarlyError
from flytekitplugins.daskpytorch.protocol.observer import Observer
from flytekitplugins.daskpytorch.settings import Search
from flytekitplugins.daskpytorch.sweep.halving import is_last
from flytekitplugins.daskpytorch.sweep.storage import Kept

if TYPE_CHECKING:
    import optuna


MODEL = "model"
"""The attribute of a trial that has its model's index."""
TAG = "daskpytorch"
"""The attribute by which a trial is found that was added a moment ago."""


class Suggestions:
    """One search, and its trials."""

    def __init__(self, search: Search) -> None:
        self.search = search
        self._lock = threading.RLock()
        """Guards the study, and what follows."""
        self._trials: dict[int, optuna.Trial] = {}
        """Of the models that have begun, by their indexes."""
        self._reported: dict[int, int] = {}
        """The last step that the study has of some of them."""

    def ask(self, index: int) -> Any:
        """A model's experiment; whatever the user's function raises."""
        with self._lock:
            trial = self.search.study.ask()
            self._trials[index] = trial
            trial.set_user_attr(MODEL, index)
        return self.search.suggest(trial)

    def attach(self, index: int, kept: Kept) -> None:
        """Go on with the trial of a model that was begun in an attempt before, or with a new one like it."""
        from optuna import Trial

        with self._lock:
            trial = self._find(kept.trial)
            if trial is None or trial.state.is_finished():
                trial = self._add(kept.trial)
            self._trials[index] = Trial(self.search.study, trial._trial_id)  # noqa: SLF001 - there is no other way
            if trial.last_step is not None:
                self._reported[index] = trial.last_step

    def recall(self, kept: Kept) -> None:
        """Have the study know of a model that ended in an attempt before."""
        with self._lock:
            trial = self._find(kept.trial)
            if trial is None:
                self.search.study.add_trial(kept.trial)
            elif not trial.state.is_finished():
                metrics = {name: value for record in kept.records for name, value in record.metrics.items()}
                self._tell(trial.number, kept.stopped, kept.result, metrics)

    def trial(self, index: int) -> optuna.trial.FrozenTrial:
        """A model's trial as it is now."""
        with self._lock:
            return self.search.study.get_trials(deepcopy=False)[self._trials[index].number]

    def reporter(self, index: int) -> Observer:
        """The watcher of one model's gang; its `logged` raises `StoppedEarlyError` when the trial is to be pruned."""
        return _Reporter(self, self._trials[index], index, self._reported.get(index, -1))

    def falls_behind(self, trial: optuna.Trial, step: int, value: float) -> bool:
        """Take in a model's value; whether it is to be stopped."""
        with self._lock:
            trial.report(value, step)
            return trial.should_prune()

    def tell(self, index: int, error: BaseException | None, result: Any, metrics: Mapping[str, Any]) -> None:
        """Tell the study how a model has ended, where it has begun."""
        with self._lock:
            if index in self._trials:
                self._tell(self._trials[index].number, error, result, metrics)

    def _tell(self, number: int, error: BaseException | None, result: Any, metrics: Mapping[str, Any]) -> None:
        from optuna.trial import TrialState

        if error is not None:
            state = TrialState.PRUNED if isinstance(error, StoppedEarlyError) else TrialState.FAIL
            self.search.study.tell(number, state=state, skip_if_finished=True)
        else:
            value = result if self.search.metric is None else metrics.get(self.search.metric)
            self.search.study.tell(number, value, skip_if_finished=True)  # which warns of what is no number

    def _find(self, wanted: optuna.trial.FrozenTrial) -> optuna.trial.FrozenTrial | None:
        trials = self.search.study.get_trials(deepcopy=False)
        found = trials[wanted.number] if wanted.number < len(trials) else None
        return found if found is not None and found.params == wanted.params else None

    def _add(self, like: optuna.trial.FrozenTrial) -> optuna.trial.FrozenTrial:
        from optuna.trial import TrialState, create_trial

        tag = uuid.uuid4().hex
        added = create_trial(
            state=TrialState.RUNNING,
            params=like.params,
            distributions=like.distributions,
            intermediate_values=like.intermediate_values,
            user_attrs={**like.user_attrs, TAG: tag},
        )
        self.search.study.add_trial(added)
        trials = self.search.study.get_trials(deepcopy=False)
        return next(trial for trial in reversed(trials) if trial.user_attrs.get(TAG) == tag)


@dataclass(eq=False)
class _Reporter(Observer):
    _suggestions: Suggestions
    _trial: optuna.Trial
    _index: int
    _epoch: int
    """The newest that was reported."""
    _is_stopped: bool = False

    def __post_init__(self) -> None:
        search = self._suggestions.search
        self._metric = search.metric if len(search.study.directions) == 1 else None  # several cannot be pruned by

    def logged(self, record: LogRecord) -> None:
        if record.rank != 0 or self._is_stopped or self._metric is None:
            return
        epoch, value = record.epoch, record.numbers.get(self._metric)
        if epoch is None or value is None or epoch <= self._epoch:  # after a restart some come again
            return
        self._epoch = epoch
        if self._suggestions.falls_behind(self._trial, epoch, value) and not is_last(record):
            self._is_stopped = True
            raise StoppedEarlyError(
                f"experiment {self._index} was stopped early, after epoch {epoch}: its {self._metric} was {value:g}, "
                f"and the study's {type(self._trial.study.pruner).__name__} wants it to end",
                epoch=epoch,
                metric=self._metric,
                value=value,
            )
