"""Recorder of a training for the Deck, in bounded memory. Runs in the driver."""

import math
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from flytekitplugins.daskpytorch.context import LogRecord, SavedCheckpoint
from flytekitplugins.daskpytorch.display.deck_page import State, Training, page_of
from flytekitplugins.daskpytorch.display.story import Story
from flytekitplugins.daskpytorch.display.training import plain_inputs
from flytekitplugins.daskpytorch.display.usage import Usages
from flytekitplugins.daskpytorch.driver.brain import GangCancelledError
from flytekitplugins.daskpytorch.errors import StoppedEarlyError
from flytekitplugins.daskpytorch.goodput import Goodput, RankUsage
from flytekitplugins.daskpytorch.protocol.observer import Observer, Shape

PACE_INTERVAL = 1.0
"""Minimum number of seconds between two points of the curve of steps per second."""
MAX_SPOILT = 20
"""Maximum number of metrics whose first NaN or infinity is shown as an event."""


class Recorder(Observer):
    """Observer that keeps the Deck's content: events, states, and the drawn values of rank 0's records.

    The gang's thread calls the observer's methods. Any thread may call `html`.
    """

    def __init__(
        self, name: str = "", inputs: Mapping[str, Any] | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._lock = threading.Lock()
        self._inputs = plain_inputs(inputs or {})
        story = Story(clock)
        self._training = Training(name=name, story=story, usages=Usages(story.began_at))
        self._paced: LogRecord | None = None
        """Record at the newest point of the curve of the pace."""
        self._spoilt: set[str] = set()
        self.num_changes = 0
        """Number of changes so far. A display that has seen this number is up to date."""

    def resumed(self, step: int) -> None:
        """Record the step of the checkpoint that the gang resumes from."""
        with self._changing():
            self._training.story.tell(f"goes on from the checkpoint of step {step:,} of the attempt before", "good")

    def placed(self, shape: Shape) -> None:
        """Record the gang's shape and name."""
        with self._changing():
            self._training.name = self._training.name or shape.name
            self._training.story.placed(shape)
            self._training.usages.expect(shape.world_size)

    def formed(self, seconds: float) -> None:
        """Record that all ranks have met."""
        with self._changing():
            self._training.story.formed()

    def logged(self, record: LogRecord) -> None:
        """Record rank 0's values."""
        if record.rank != 0:
            return
        record = record.bare()
        with self._changing():
            numbers = record.numbers
            self._training.metrics.take(record.step, numbers)
            self._measure(record)
            self._look_for_spoilt(record.step, numbers)
            self._training.record = record

    def kept(self, step: int) -> None:
        """Record the checkpoint of a step."""
        with self._changing():
            self._training.story.kept(step)

    def keeps(self, checkpoints: Sequence[SavedCheckpoint]) -> None:
        """Record the list of kept checkpoints."""
        with self._changing():
            self._training.checkpoints = checkpoints

    def used(self, usage: RankUsage) -> None:
        """Record a rank's sample of CPU, memory and GPU."""
        with self._changing():
            self._training.usages.take(usage)

    def accounted(self, goodput: Goodput) -> None:
        """Record the newest account of the gang's time."""
        with self._changing():
            self._training.goodput = goodput

    def restarting(self, reason: str, step: int | None) -> None:
        """Record the reason for a restart, and drop the values that will be logged again."""
        with self._changing():
            self._training.metrics.cut(step)
            self._training.rate.clear()
            self._paced = self._training.record = None
            self._spoilt.clear()
            self._training.story.restarting(reason, step)

    def noted(self, text: str) -> None:
        """Record a notice as an event."""
        with self._changing():
            self._training.story.noted(text)

    def ended(self, error: Exception | None) -> None:
        """Record the gang's outcome."""
        self.conclude(error)

    def conclude(self, error: BaseException | None) -> None:
        """Record the outcome of the training. The first error wins over later errors and over success."""
        with self._changing():
            training, story = self._training, self._training.story
            if error is None:
                training.outcome = training.outcome or State("done", "good", is_over=True)
                story.ended("ended", "good")
            elif not training.failure:
                training.outcome, training.failure = _outcome_of(error)
                story.ended_at = None
                story.ended(f"{training.outcome.word}: {training.failure}", training.outcome.tone)

    def html(self, places: Mapping[str, str] | None = None) -> str:
        """Return the body of the Deck in its present state.

        Args:
            places: Addresses of outputs and runs, by description.
        """
        with self._lock:  # held as briefly as possible, since the gang's thread waits
            copied = pickle.dumps(self._training)
        training = cast("Training", pickle.loads(copied))  # noqa: S301 - our own, of a moment ago
        return page_of(training, self._inputs, places or {})

    def _changing(self) -> threading.Lock:
        self.num_changes += 1
        return self._lock

    def _measure(self, record: LogRecord) -> None:
        """Add a point to the curve of the pace, if `PACE_INTERVAL` has passed."""
        self._training.rate.add(record.time, record.step)
        if self._paced is None or record.step < self._paced.step:
            self._paced = record
        elif record.time - self._paced.time >= PACE_INTERVAL and (steps := self._training.rate.per_second):
            self._training.pace.add((record.step, record.time - self._training.story.began_at, steps))
            self._paced = record

    def _look_for_spoilt(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            if not math.isfinite(value) and name not in self._spoilt and len(self._spoilt) < MAX_SPOILT:
                self._spoilt.add(name)
                self._training.story.tell(f"{name} is {value:g} at step {step:,}", "bad")


def _outcome_of(error: BaseException) -> tuple[State, str]:
    text = str(error.__cause__ or error) or type(error).__name__
    if isinstance(error, StoppedEarlyError):
        return State("stopped early", "warn", is_over=True), text
    if isinstance(error, (KeyboardInterrupt, GangCancelledError)):
        return State("interrupted", "warn", is_over=True), text
    return State("failed", "bad", is_over=True), text
