"""Trials of an Optuna study, one for each model: suggested experiments, reported metrics and early stopping.

Runs in the driver. `EarlyStopping` has a study in memory, whose pruner compares models by asynchronous successive
halving. Each gang has a judge, which runs on the thread of the gang's supervisor.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from flytekitplugins.daskpytorch.checks import direction_of
from flytekitplugins.daskpytorch.display.run_state import RunState, View
from flytekitplugins.daskpytorch.errors import StoppedEarlyError
from flytekitplugins.daskpytorch.protocol import journal
from flytekitplugins.daskpytorch.records import LogRecord
from flytekitplugins.daskpytorch.settings import EarlyStopping, Search
from flytekitplugins.daskpytorch.sweep.storage import KeptModel

if TYPE_CHECKING:
    import optuna


MAX_NAMES = 20
MODEL = "model"
KEPT_OF_TRIALS = ("params", "distributions", "intermediate_values", "user_attrs")


class Trials:
    def __init__(self, asked: EarlyStopping | Search, num_models: int) -> None:
        self.asked = asked
        self.num_models = num_models
        self.suggests = isinstance(asked, Search)
        self.study = asked.study if isinstance(asked, Search) else _new_study(asked)
        self.metric = asked.metric if len(self.study.directions) == 1 else None
        """None without early stopping, or if the study has several directions, by which Optuna cannot prune."""
        self._lock = threading.Lock()
        """No other report comes between a value's report and its comparison."""
        self._trials: dict[int, optuna.Trial] = {}
        self.is_metric_known = self.suggests

    def ask(self, index: int) -> Any:
        with self._lock:
            trial = self._trials[index] = self.study.ask()
            trial.set_user_attr(MODEL, index)
        return cast("Search", self.asked).suggest(trial)

    def resume(self, index: int, before: optuna.trial.FrozenTrial) -> None:
        from optuna.trial import Trial, TrialState, create_trial

        with self._lock:
            found = self._find(before)
            if found is None or found.state.is_finished():
                same = {name: getattr(before, name) for name in KEPT_OF_TRIALS}
                self.study.add_trial(create_trial(state=TrialState.RUNNING, **same))
                is_own = (trial for trial in reversed(self._all()) if trial.user_attrs.get(MODEL) == index)
                found = next(is_own)
            self._trials[index] = Trial(self.study, found._trial_id)  # noqa: SLF001 - there is no other way

    def recall(self, index: int, kept: KeptModel) -> None:
        """Report a model that ended in an earlier call to a study that does not know of its end."""
        if not self.suggests:
            self.watch(index, lambda _: None, kept.records).take_before(math.inf)
            return
        with self._lock:
            if self._find(kept.trial) is None:
                self.study.add_trial(kept.trial)

    def trial(self, index: int) -> optuna.trial.FrozenTrial:
        with self._lock:
            return self._all()[self._trials[index].number]

    def watch(self, index: int, say: Callable[[str], None], before: Sequence[LogRecord] = ()) -> _Judge:
        """Return the observer of one model's gang, whose `on_log` raises `StoppedEarlyError` to stop the model.

        If the gang resumes, the earlier call's records `before` up to the checkpoint's step are reported first.
        """
        if not self.suggests:  # a search has asked for the trial already
            with self._lock:
                self._trials[index] = self.study.ask()
        last = self.trial(index).last_step
        return _Judge(self, self._trials[index], index, say, before, -1 if last is None else last)

    def falls_behind(self, trial: optuna.Trial, epoch: int, value: float) -> bool:
        with self._lock:
            trial.report(value, epoch)
            return trial.should_prune()

    def claim_notice(self) -> bool:
        with self._lock:
            is_first, self.is_metric_known = not self.is_metric_known, True
            return is_first

    def why(self, value: float) -> str:
        if isinstance(self.asked, Search):
            return f"and the study's {type(self.study.pruner).__name__} wants it to end"
        if math.isnan(value):
            return "which is not a number"
        best = f"among the best 1/{self.asked.reduction_factor} ({self.asked.mode or direction_of(self.asked.metric)})"
        return f"which is not {best} of what models had there"

    def tell(self, index: int, error: BaseException | None, result: Any, metrics: Mapping[str, Any]) -> None:
        """Report a model's end to the user's study.

        In early stopping, withdraw a failed or cancelled model's values.
        """
        from optuna.trial import TrialState

        with self._lock:
            if (trial := self._trials.get(index)) is None:
                return
            if not self.suggests:
                if error is not None and not isinstance(error, StoppedEarlyError):
                    # The pruner has each trial's values at its rungs here. A study in memory hands out its own trials.
                    self._all()[trial.number].system_attrs.clear()
            elif error is not None:
                state = TrialState.PRUNED if isinstance(error, StoppedEarlyError) else TrialState.FAIL
                self.study.tell(trial, state=state, skip_if_finished=True)
            else:
                value = result if self.asked.metric is None else metrics.get(self.asked.metric)
                self.study.tell(trial, value, skip_if_finished=True)  # Optuna warns if the value is not a number

    def _all(self) -> list[optuna.trial.FrozenTrial]:
        return self.study.get_trials(deepcopy=False)

    def _find(self, wanted: optuna.trial.FrozenTrial) -> optuna.trial.FrozenTrial | None:
        found = next(iter(self._all()[wanted.number :]), None)
        return found if found is not None and found.params == wanted.params else None


@dataclass(eq=False)
class _Judge(View):
    _trials: Trials
    _trial: optuna.Trial
    _index: int
    _say: Callable[[str], None]
    _before: Sequence[LogRecord]
    _last_epoch: int
    _is_stopped: bool = False
    state: RunState = field(default_factory=RunState)

    def on_event(self, event: journal.Event) -> None:
        if isinstance(event, journal.Resumed):
            self.take_before(event.step)
        super().on_event(event)

    def take_before(self, step: float) -> None:
        """Report an earlier call's records up to `step`. Their values do not stop the model again."""
        for record in self._before:
            if record.step <= step:
                self._falls_behind(record)

    def on_log(self, record: LogRecord) -> None:
        if record.rank != 0 or self._is_stopped or not self._falls_behind(record) or _is_last(record):
            return
        self._is_stopped = True
        trials, metric = self._trials, str(self._trials.metric)
        epoch, value = record.epoch or 0, record.numbers[metric]
        raise StoppedEarlyError(
            f"experiment {self._index} of {trials.num_models} was stopped early, after epoch {epoch}: its {metric} was "
            f"{value:g}, {trials.why(value)}",
            epoch=epoch,
            metric=metric,
            value=value,
        )

    def on_end(self, error: Exception | None) -> None:
        if error is not None or not self._trials.claim_notice():
            return
        names = ", ".join(sorted(self.state.values.metrics)[:MAX_NAMES]) or "nothing"
        self._say(
            f"early stopping: no record so far had both 'epoch' and {self._trials.metric!r} as numbers, so no model "
            f"can be stopped; logged were: {names}. Log both in one record at the end of each epoch"
        )

    def _falls_behind(self, record: LogRecord) -> bool:
        trials, epoch = self._trials, record.epoch
        value = record.numbers.get(trials.metric) if trials.metric is not None else None
        if epoch is None or epoch < 0 or value is None:
            return False
        trials.is_metric_known = True
        if epoch <= self._last_epoch:  # a restarted gang logs earlier epochs again
            return False
        self._last_epoch = epoch
        return trials.falls_behind(self._trial, epoch, value)


def _new_study(settings: EarlyStopping) -> optuna.Study:
    import optuna

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # Optuna logs every new study
    try:
        return optuna.create_study(
            sampler=optuna.samplers.RandomSampler(),  # unused
            direction="minimize" if (settings.mode or direction_of(settings.metric)) == "min" else "maximize",
            pruner=optuna.pruners.SuccessiveHalvingPruner(
                min_resource=settings.grace_period,
                reduction_factor=settings.reduction_factor,
                min_early_stopping_rate=0,
                bootstrap_count=0,  # a higher count would stop the first models at a rung, however good
            ),
        )
    finally:
        optuna.logging.set_verbosity(verbosity)


def _is_last(record: LogRecord) -> bool:
    return record.num_steps is not None and record.step + 1 >= record.num_steps
