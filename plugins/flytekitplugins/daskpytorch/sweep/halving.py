"""Stops models that fall behind the others, by asynchronous successive halving. Runs in the driver.

Optuna's pruner decides; a study in memory, with a trial for each model, is what it compares. Each gang's judge hears of
its records on the thread of that gang's supervisor.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flytekitplugins.daskpytorch.context import LogRecord
from flytekitplugins.daskpytorch.errors import StoppedEarlyError
from flytekitplugins.daskpytorch.protocol.observer import Observer
from flytekitplugins.daskpytorch.settings import EarlyStopping

if TYPE_CHECKING:
    import optuna


MAX_NAMES = 20
"""Of metrics, in the notice that the one asked for is not among them."""


class Halving:
    """All models of one `dispatch.map`, and how they compare."""

    def __init__(self, settings: EarlyStopping, num_models: int) -> None:
        self.settings = settings
        self.num_models = num_models
        self._lock = threading.Lock()
        """Guards all that follows: a trial's report and the look at all the others are one step."""
        self._study = _new_study(settings)
        self._has_said = False
        """It needs not, or not again, be said that the metric is missing."""

    def judge(self, index: int, say: Callable[[str], None], before: Sequence[LogRecord] = ()) -> _Judge:
        """The watcher of one model's gang; its `logged` raises `StoppedEarlyError` when the model is to be stopped.

        `before` is what the model has logged in an attempt before: it counts as far as the gang goes on from there.
        """
        with self._lock:
            return _Judge(self, self._study.ask(), index, say, before)

    def remember(self, index: int, records: Sequence[LogRecord], error: StoppedEarlyError | None) -> None:
        """Compare the others with a model that has ended in an attempt before, too."""
        judge = self.judge(index, lambda _: None, records)
        judge.recall(math.inf)
        self.settle(judge.trial, error, judge.value)

    def falls_behind(self, trial: optuna.Trial, epoch: int, value: float) -> bool:
        """Take in a model's value at a rung, or after it; whether it is to be stopped."""
        with self._lock:
            trial.report(value, epoch)
            return trial.should_prune()

    def next_rung(self, epoch: int) -> int:
        """The first epoch after this one at which models are compared."""
        rung = self.settings.grace_period
        while rung <= epoch:
            rung *= self.settings.reduction_factor
        return rung

    def note_metric(self) -> None:
        """Some model has reported the metric."""
        self._has_said = True

    def settle(self, trial: optuna.Trial, error: Exception | None, value: float) -> None:
        """Note a model's end: with or without an error, at this value of its metric."""
        from optuna.trial import TrialState

        with self._lock:
            if isinstance(error, StoppedEarlyError):
                self._study.tell(trial, state=TrialState.PRUNED)
            elif error is not None or math.isnan(value):
                self._study.tell(trial, state=TrialState.FAIL)
            else:
                self._study.tell(trial, value)

    def may_say(self) -> bool:
        """Whether to say that the metric is missing: once, and only while no model has reported any."""
        with self._lock:
            has_said, self._has_said = self._has_said, True
        return not has_said


@dataclass(eq=False)
class _Judge(Observer):
    _halving: Halving
    trial: optuna.Trial
    _index: int
    _say: Callable[[str], None]
    _before: Sequence[LogRecord] = ()
    _epoch: int | None = None
    """The newest that was reported."""
    value: float = math.nan
    """The metric after it."""
    _first_epoch: int | None = None
    """The first that was logged with or without the metric."""
    _names: set[str] = field(default_factory=set)
    """What was logged while the metric was not."""
    _is_stopped: bool = False

    def __post_init__(self) -> None:
        self._settings = self._halving.settings
        self._rung = self._halving.next_rung(0)
        """The epoch from which on the next value is compared; Optuna takes ever longer to keep those between."""

    def resumed(self, step: int) -> None:
        self.recall(step)

    def recall(self, step: float) -> None:
        """Take in what was logged before, up to this step; what was decided then, was."""
        for record in self._before:
            if record.step <= step:
                self._take(record)

    def logged(self, record: LogRecord) -> None:
        if record.rank == 0 and not self._is_stopped and self._take(record) and not is_last(record):
            self._is_stopped = True
            raise self._verdict(self._epoch or 0, self.value)

    def _take(self, record: LogRecord) -> bool:
        """Note a record; whether the model falls behind."""
        numbers = record.numbers
        epoch = record.epoch if (record.epoch or 0) >= 0 else None  # rungs count from 0
        value = numbers.get(self._settings.metric)
        if epoch is None or value is None:
            self._miss(epoch, record)
        elif self._epoch is None or epoch > self._epoch:  # after a restart some come again
            if self._epoch is None:
                self._halving.note_metric()
            self._epoch, self.value = epoch, value
            return self._falls_behind(epoch, value)
        return False

    def ended(self, error: Exception | None) -> None:
        self._halving.settle(self.trial, error, self.value)
        if error is None and self._epoch is None:
            self._complain()

    def _falls_behind(self, epoch: int, value: float) -> bool:
        if epoch < self._rung:
            return False
        self._rung = self._halving.next_rung(epoch)
        return self._halving.falls_behind(self.trial, epoch, value)

    def _verdict(self, epoch: int, value: float) -> StoppedEarlyError:
        settings = self._settings
        why = (
            "which is not a number"
            if math.isnan(value)
            else f"which is not among the best 1/{settings.reduction_factor} ({settings.mode}) of what models had there"
        )
        return StoppedEarlyError(
            f"experiment {self._index} of {self._halving.num_models} was stopped early, after epoch {epoch}: "
            f"its {settings.metric} was {value:g}, {why}",
            epoch=epoch,
            metric=settings.metric,
            value=value,
        )

    def _miss(self, epoch: int | None, record: LogRecord) -> None:
        """Note a record that cannot be compared; once a rung's epoch is over without one that can, say so."""
        if self._epoch is not None:
            return
        if len(self._names) < MAX_NAMES:
            self._names.update(record.metrics)
        if epoch is None:
            return
        if self._first_epoch is None:
            self._first_epoch = epoch
        if epoch > max(self._first_epoch, self._settings.grace_period):
            self._complain()

    def _complain(self) -> None:
        if self._halving.may_say():
            names = ", ".join(sorted(self._names)[:MAX_NAMES]) or "nothing"
            wanted = f"both 'epoch' and {self._settings.metric!r} as numbers"
            self._say(
                f"early stopping: no record so far had {wanted}, so no model can be stopped; logged were: {names}"
            )


def _new_study(settings: EarlyStopping) -> optuna.Study:
    import optuna

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # it tells of every study that is made
    try:
        return optuna.create_study(
            storage=optuna.storages.InMemoryStorage(),
            sampler=optuna.samplers.RandomSampler(),  # which nobody asks
            direction="minimize" if settings.mode == "min" else "maximize",
            pruner=optuna.pruners.SuccessiveHalvingPruner(
                min_resource=settings.grace_period,
                reduction_factor=settings.reduction_factor,
                min_early_stopping_rate=0,
                bootstrap_count=0,  # more would stop the first that come to a rung, however good
            ),
        )
    finally:
        optuna.logging.set_verbosity(verbosity)


def is_last(record: LogRecord) -> bool:
    """Whether the training is done but for its end: stopping it would save nothing and cost its result."""
    return record.num_steps is not None and record.step + 1 >= record.num_steps
