"""Observer that feeds a tracker's run from the driver.

The driver outlives all ranks and attempts, and knows each restart's step and the outcome. No worker needs to reach the
tracker's server.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from flytekitplugins.daskpytorch.display.feeder import Feeder
from flytekitplugins.daskpytorch.display.training import MAX_RANKS, amounts, gang_config
from flytekitplugins.daskpytorch.driver.brain import GangCancelledError
from flytekitplugins.daskpytorch.errors import PreemptedError, StoppedEarlyError
from flytekitplugins.daskpytorch.protocol.observer import GoodputObserver, Shape, Training
from flytekitplugins.daskpytorch.records import LogRecord, RankUsage

State = Literal["finished", "failed", "killed"]

CLOSE_TIMEOUT = 60.0
"""Timeout, in seconds, for sending a tracker's queued records at the gang's end."""
PREEMPTED_TIMEOUT = 3.0
"""Timeout, in seconds, for sending a tracker's queued records after a preemption."""


class Run:
    """Base class for a tracker's run, for example in MLflow. One thread makes all calls, one after the other.

    A call is repeated after a `ConnectionError`. After any other error of `open`, nothing is recorded. Any other
    method's failed call is skipped.
    """

    label: str
    """Name of the tracker."""
    where: str | None = None
    """Address of the run, for the user. None until `open` has set the address."""

    def open(self, training: Training, config: Mapping[str, Any], step: int | None) -> None:
        """Begin the tracker's run, or resume that of an earlier attempt.

        Args:
            training: Training that the run records.
            config: Configuration of the run: inputs and the gang's shape.
            step: Step of the checkpoint that the gang resumes from. None: the gang starts from the beginning.
        """
        raise NotImplementedError

    def rewind(self, step: int | None) -> None:
        """Prepare for a restart, after which the records after `step` are logged again. None: all records."""

    def log(self, record: LogRecord) -> None:
        """Log a record in the tracker's run."""
        raise NotImplementedError

    def note(self, text: str) -> None:
        """Log a notice for the user in the tracker's run."""

    def flush(self) -> None:
        """Send the queued values to the tracker."""

    def close(self, state: State, reason: str | None) -> None:
        """End the tracker's run.

        Args:
            state: Final state of the run.
            reason: Reason for a failure, a cancellation or early stopping. None for a finished training.
        """
        raise NotImplementedError


class Tracker(GoodputObserver):
    """Observer that records a gang's events in a tracker's run. Only `ended` waits for the tracker.

    No error of the tracker reaches the training.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._feeder = Feeder(run.label, run.flush)
        self._training: Training | None = None
        self._is_placed = False
        self._resumed_at: int | None = None
        self._newest: LogRecord | None = None

    def places(self) -> Mapping[str, str]:
        """Return the address of the run, by the tracker's name. Empty until the run is open."""
        return {self._run.label: self._run.where} if self._run.where is not None else {}

    def begins(self, training: Training) -> None:
        """Keep the training's name, inputs and id for the run."""
        self._training = training

    def resumed(self, step: int) -> None:
        """Keep the step of the checkpoint that the gang resumes from."""
        self._resumed_at = step

    def placed(self, shape: Shape) -> None:
        """Open the run in the gang's first attempt. Later calls, at restarts, do nothing."""
        if self._training is not None and not self._is_placed:
            self._is_placed = True
            config = {**self._training.inputs, "gang": gang_config(shape)}
            self._feeder.start(partial(self._run.open, self._training, config, self._resumed_at))

    def restarting(self, reason: str, step: int | None) -> None:
        """Queue a call of `Run.rewind` with the step of the checkpoint that the gang restarts from."""
        self._newest = None
        self._feeder.put(partial(self._run.rewind, step))

    def logged(self, record: LogRecord) -> None:
        """Queue a record of rank 0 for the run. Records of other ranks are ignored."""
        if record.rank == 0:
            self._newest = self._newest if record.is_evaluation else record
            self._feeder.offer(partial(self._run.log, record))

    def used(self, usage: RankUsage) -> None:
        """Queue a rank's usage of CPU, memory and GPU as metrics of rank 0's newest step."""
        if usage.rank < MAX_RANKS:
            self._add({f"usage/rank {usage.rank}/{name}": value for name, value in amounts(usage).items()})

    def _add(self, metrics: Mapping[str, float]) -> None:
        """Queue the plugin's own metrics under the newest step, if rank 0 has logged a step."""
        if (newest := self._newest) is not None:
            self._feeder.offer(partial(self._run.log, replace(newest, time=time.time(), metrics=metrics)))

    def noted(self, text: str) -> None:
        """Queue a notice for the run."""
        self._feeder.offer(partial(self._run.note, text))

    def ended(self, error: Exception | None) -> None:
        """Close the run. Wait until all records are sent, the tracker cannot be reached, or the timeout is over."""
        if not self._feeder.is_feeding:
            return
        if self.goodput is not None:
            account = {"share": self.goodput.share, **self.goodput.as_dict()}
            self._add({f"goodput/{name}": value for name, value in account.items()})
        limit = PREEMPTED_TIMEOUT if isinstance(error, PreemptedError) else CLOSE_TIMEOUT
        self._feeder.end(partial(self._run.close, *_state(error)), limit)


def _state(error: Exception | None) -> tuple[State, str | None]:
    reason = None if error is None else f"{type(error).__name__}: {error}"
    if error is None or isinstance(error, StoppedEarlyError):
        return "finished", reason
    return "killed" if isinstance(error, (GangCancelledError, PreemptedError)) else "failed", reason
