"""Early stopping of a sweep's models, by asynchronous successive halving. Runs in the driver.

Each gang has a judge, which runs on the thread of the gang's supervisor.
"""

from __future__ import annotations

import bisect
import math
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flytekitplugins.daskpytorch.checks import direction_of
from flytekitplugins.daskpytorch.errors import StoppedEarlyError
from flytekitplugins.daskpytorch.protocol import journal
from flytekitplugins.daskpytorch.protocol.observer import Observer
from flytekitplugins.daskpytorch.records import LogRecord
from flytekitplugins.daskpytorch.settings import EarlyStopping


class Rungs:
    """Values of all models at each rung, and their comparison."""

    def __init__(self, settings: EarlyStopping, num_models: int) -> None:
        self.settings = settings
        self.num_models = num_models
        self.mode = settings.mode or direction_of(settings.metric)
        self.is_metric_known = False
        self._lock = threading.Lock()
        self._values: defaultdict[int, list[float]] = defaultdict(list)
        """By rung. Low values are good."""
        self._num_passed: Counter[int] = Counter()
        """Number of rungs that each model has reached."""

    def falls_behind(self, index: int, epoch: int, value: float) -> bool:
        settings = self.settings
        with self._lock:
            while epoch >= settings.grace_period * settings.reduction_factor ** self._num_passed[index]:
                if math.isnan(value):
                    return True
                signed = value if self.mode == "min" else -value
                rung = self._values[self._num_passed[index]]
                bisect.insort(rung, signed)
                self._num_passed[index] += 1
                num_best = max(1, len(rung) // settings.reduction_factor)
                if signed > rung[num_best - 1]:
                    return True
        return False

    def claim_notice(self) -> bool:
        with self._lock:
            is_first, self.is_metric_known = not self.is_metric_known, True
            return is_first


@dataclass(eq=False)
class Judge(Observer):
    """Observer of one model's gang, whose `on_log` raises `StoppedEarlyError` to stop the model."""

    _rungs: Rungs
    _index: int
    _say: Callable[[str], None]
    _before: Sequence[LogRecord] = ()
    """An earlier call's records. If the gang resumes, those up to the checkpoint's step are reported first."""
    _last_epoch: int = -1
    _is_stopped: bool = False

    def on_event(self, event: journal.Event) -> None:
        if isinstance(event, journal.Resumed):
            self.take_before(event.step)
        super().on_event(event)

    def take_before(self, step: float = math.inf) -> None:
        """Report an earlier call's records up to `step`. Their values do not stop the model again."""
        for record in self._before:
            if record.step <= step:
                self._falls_behind(record)

    def on_log(self, record: LogRecord) -> None:
        if record.rank != 0 or self._is_stopped or not self._falls_behind(record) or _is_last(record):
            return
        self._is_stopped = True
        rungs, metric = self._rungs, self._rungs.settings.metric
        epoch, value = record.epoch or 0, record.numbers[metric]
        best = f"among the best 1/{rungs.settings.reduction_factor} ({rungs.mode})"
        why = "a number" if math.isnan(value) else f"{best} of what models had there"
        raise StoppedEarlyError(
            f"experiment {self._index} of {rungs.num_models} was stopped early, after epoch {epoch}: its {metric} was "
            f"{value:g}, which is not {why}",
            epoch=epoch,
            metric=metric,
            value=value,
        )

    def on_end(self, error: Exception | None) -> None:
        if error is not None or not self._rungs.claim_notice():
            return
        self._say(
            f"early stopping: no record so far had both 'epoch' and {self._rungs.settings.metric!r} as numbers, so no "
            "model can be stopped. Log both in one record at the end of each epoch"
        )

    def _falls_behind(self, record: LogRecord) -> bool:
        epoch, value = record.epoch, record.numbers.get(self._rungs.settings.metric)
        if epoch is None or epoch < 0 or value is None:
            return False
        self._rungs.is_metric_known = True
        if epoch <= self._last_epoch:  # a restarted gang logs earlier epochs again
            return False
        self._last_epoch = epoch
        return self._rungs.falls_behind(self._index, epoch, value)


def _is_last(record: LogRecord) -> bool:
    return record.num_steps is not None and record.step + 1 >= record.num_steps
