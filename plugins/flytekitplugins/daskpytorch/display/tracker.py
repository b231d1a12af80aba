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
from flytekitplugins.daskpytorch.display.run_state import RunState, View
from flytekitplugins.daskpytorch.display.training import MAX_RANKS, amounts, gang_config
from flytekitplugins.daskpytorch.errors import PreemptedError
from flytekitplugins.daskpytorch.protocol import journal
from flytekitplugins.daskpytorch.protocol.journal import Training
from flytekitplugins.daskpytorch.records import LogRecord

State = Literal["finished", "failed", "killed"]
STATES: Mapping[str, State] = {"done": "finished", "stopped early": "finished", "failed": "failed"}
"""States of a tracker's run by the word of the gang's end. Other ends: killed."""

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


class Tracker(View):
    """Observer that records a gang's events in a tracker's run. Only the gang's end waits for the tracker.

    No error of the tracker reaches the training.
    """

    def __init__(self, run: Run) -> None:
        self.state = RunState()
        self._run = run
        self._feeder = Feeder(run.label, run.flush)

    def places(self) -> Mapping[str, str]:
        """Return the address of the run, by the tracker's name. Empty until the run is open."""
        return {self._run.label: self._run.where} if self._run.where is not None else {}

    def on_event(self, event: journal.Event) -> None:
        """Queue an event for the run."""
        match event:
            case journal.Placed(shape=shape) if self.state.attempt == 0 and self.state.training is not None:
                config = {**self.state.training.inputs, "gang": gang_config(shape)}
                self._feeder.start(partial(self._run.open, self.state.training, config, self.state.resumed_step))
            case journal.Restarted(step=step):
                self._feeder.put(partial(self._run.rewind, step))
            case journal.Logged(record=record) if record.rank == 0:
                self._feeder.offer(partial(self._run.log, record))
            case journal.Used(usage=usage) if usage.rank < MAX_RANKS:
                self._add({f"usage/rank {usage.rank}/{name}": value for name, value in amounts(usage).items()})
            case journal.Noted():
                self._feeder.offer(partial(self._run.note, event.line))
            case journal.Ended():
                self._end(event)

    def _add(self, metrics: Mapping[str, float]) -> None:
        """Queue the plugin's own metrics under the newest step, if rank 0 has logged a step."""
        if (newest := self.state.record) is not None:
            self._feeder.offer(partial(self._run.log, replace(newest, time=time.time(), metrics=metrics)))

    def _end(self, event: journal.Ended) -> None:
        """Close the run. Wait until all records are sent, the tracker cannot be reached, or the timeout is over."""
        if not self._feeder.is_feeding:
            return
        if (goodput := self.state.goodput) is not None:
            account = {"share": goodput.share, **goodput.as_dict()}
            self._add({f"goodput/{name}": value for name, value in account.items()})
        limit = PREEMPTED_TIMEOUT if isinstance(event.error, PreemptedError) else CLOSE_TIMEOUT
        reason = f"{event.end.error}: {event.error}" if event.end.error else None
        self._feeder.end(partial(self._run.close, STATES.get(event.end.word, "killed"), reason), limit)
