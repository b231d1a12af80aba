"""A tracker's run, fed in the driver.

In the driver rather than in rank 0: there it outlives every rank and every attempt, knows what the gang goes back to
and how it ends, and no worker needs to reach the server.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from flytekitplugins.daskpytorch.context import LogRecord
from flytekitplugins.daskpytorch.display.feeder import Feeder
from flytekitplugins.daskpytorch.display.training import gang_config
from flytekitplugins.daskpytorch.display.usage import GIB
from flytekitplugins.daskpytorch.driver.brain import GangCancelledError
from flytekitplugins.daskpytorch.errors import PreemptedError, StoppedEarlyError
from flytekitplugins.daskpytorch.goodput import Goodput, RankUsage
from flytekitplugins.daskpytorch.protocol.observer import Observer, Shape, Training

State = Literal["finished", "failed", "killed"]

CLOSE_TIMEOUT = 60.0
"""Seconds at the end for all that waits."""
PREEMPTED_TIMEOUT = 3.0
"""The same where the task is told to end."""
MAX_RANKS = 8
"""Whose use of their machines is recorded: of larger gangs that of the first ranks."""


class Run:
    """What a tracker does, one call after the other, in its thread.

    What raises a `ConnectionError` is called again until it does not. After another error of `open` the run is given
    up, after one of the others that call.
    """

    label: str
    """The tracker's name."""
    where: str | None = None
    """The run's place, once that is known."""

    def open(self, training: Training, config: Mapping[str, Any], step: int | None) -> None:
        """Begin the run, or go on with that of an attempt before, from this step; None: from the beginning."""
        raise NotImplementedError

    def rewind(self, step: int | None) -> None:
        """What was logged after this step will come again; None: all."""

    def log(self, record: LogRecord) -> None:
        """Take a record."""
        raise NotImplementedError

    def note(self, text: str) -> None:
        """Take something that a user should read."""

    def flush(self) -> None:
        """Send on what waits here."""

    def close(self, state: State, reason: str | None) -> None:
        """End the run; `reason` is why it has not finished, or was stopped early."""
        raise NotImplementedError


class Tracker(Observer):
    """Tells a run of what happens in a gang. Calls return at once, and no failure reaches the training."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._feeder = Feeder(run.label, run.flush)
        self._training: Training | None = None
        self._is_placed = False
        self._resumed_at: int | None = None
        self._newest: LogRecord | None = None
        self._goodput: Goodput | None = None

    def places(self) -> Mapping[str, str]:
        """The run's."""
        return {self._run.label: self._run.where} if self._run.where is not None else {}

    def begins(self, training: Training) -> None:
        """Note what it is."""
        self._training = training

    def resumed(self, step: int) -> None:
        """Note from where."""
        self._resumed_at = step

    def placed(self, shape: Shape) -> None:
        """Open the run, if it is not open."""
        if self._training is not None and not self._is_placed:
            self._is_placed = True
            config = {**self._training.inputs, "gang": gang_config(shape)}
            self._feeder.start(partial(self._run.open, self._training, config, self._resumed_at))

    def restarting(self, reason: str, step: int | None) -> None:
        """Go back."""
        self._newest = None
        self._feeder.put(partial(self._run.rewind, step))

    def logged(self, record: LogRecord) -> None:
        """Queue a record of rank 0."""
        if record.rank == 0:
            self._newest = record
            self._feeder.offer(partial(self._run.log, record))

    def used(self, usage: RankUsage) -> None:
        """Queue what a rank uses, as metrics of the newest step."""
        if usage.rank < MAX_RANKS:
            self._add({f"usage/rank {usage.rank}/{name}": value for name, value in _amounts(usage).items()})

    def accounted(self, goodput: Goodput) -> None:
        """Keep it for the end."""
        self._goodput = goodput

    def _add(self, metrics: Mapping[str, float]) -> None:
        """Queue metrics of our own, if there is a step that they can belong to."""
        if (newest := self._newest) is not None:
            self._feeder.offer(partial(self._run.log, replace(newest, time=time.time(), metrics=metrics)))

    def noted(self, text: str) -> None:
        """Queue it."""
        self._feeder.offer(partial(self._run.note, text))

    def ended(self, error: Exception | None) -> None:
        """Close the run, and wait until all has got through, or nothing does any more."""
        if not self._feeder.is_feeding:
            return
        if self._goodput is not None:
            account = {"share": self._goodput.share, **self._goodput.as_dict()}
            self._add({f"goodput/{name}": value for name, value in account.items()})
        self._feeder.put(self._run.flush)
        limit = PREEMPTED_TIMEOUT if isinstance(error, PreemptedError) else CLOSE_TIMEOUT
        self._feeder.end(partial(self._run.close, *_state(error)), limit)


def _amounts(usage: RankUsage) -> dict[str, float]:
    amounts = {"cpu_cores": usage.cpu, "memory_gib": usage.memory / GIB}
    if usage.gpu_memory is not None:
        amounts["gpu_memory_gib"] = usage.gpu_memory / GIB
    if usage.gpu_utilization is not None:
        amounts["gpu_percent"] = 100 * usage.gpu_utilization
    return amounts


def _state(error: Exception | None) -> tuple[State, str | None]:
    reason = None if error is None else f"{type(error).__name__}: {error}"
    if error is None or isinstance(error, StoppedEarlyError):
        return "finished", reason
    return "killed" if isinstance(error, (GangCancelledError, PreemptedError)) else "failed", reason
