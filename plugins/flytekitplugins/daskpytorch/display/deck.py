"""What a training's Deck tells of: an observer that keeps it, in bounded memory. Runs in the driver."""

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
"""Seconds between two points of the line of steps per second."""
MAX_SPOILT = 20
"""Metrics of which it is said that they have become no numbers."""


class Recorder(Observer):
    """Keeps what happened, as far as the Deck shows it: of the records rank 0's, and of these what is drawn.

    Its methods are called on the gang's thread, and `html` on any.
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
        """Keep where it starts."""
        with self._changing():
            self._training.story.tell(f"goes on from the checkpoint of step {step:,} of the attempt before", "good")

    def placed(self, shape: Shape) -> None:
        """Keep the gang's shape."""
        with self._changing():
            self._training.name = self._training.name or shape.name
            self._training.story.placed(shape)
            self._training.usages.expect(shape.world_size)

    def formed(self, seconds: float) -> None:
        """Keep when."""
        with self._changing():
            self._training.story.formed()

    def logged(self, record: LogRecord) -> None:
        """Keep rank 0's values."""
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
        """Keep when."""
        with self._changing():
            self._training.story.kept(step)

    def keeps(self, checkpoints: Sequence[SavedCheckpoint]) -> None:
        """Keep which they are."""
        with self._changing():
            self._training.checkpoints = checkpoints

    def used(self, usage: RankUsage) -> None:
        """Keep what a rank uses."""
        with self._changing():
            self._training.usages.take(usage)

    def accounted(self, goodput: Goodput) -> None:
        """Keep where the time went."""
        with self._changing():
            self._training.goodput = goodput

    def restarting(self, reason: str, step: int | None) -> None:
        """Keep the reason, and drop what will be logged again."""
        with self._changing():
            self._training.metrics.cut(step)
            self._training.rate.clear()
            self._paced = self._training.record = None
            self._spoilt.clear()
            self._training.story.restarting(reason, step)

    def noted(self, text: str) -> None:
        """Keep what was said."""
        with self._changing():
            self._training.story.noted(text)

    def ended(self, error: Exception | None) -> None:
        """Keep the outcome."""
        self.conclude(error)

    def conclude(self, error: BaseException | None) -> None:
        """Keep how it has ended: the first error counts, and an error more than none."""
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
        """The Deck's body, as of now.

        Args:
            places: What the run leaves, and where.
        """
        with self._lock:  # as short as can be: the gang's thread waits for it
            copied = pickle.dumps(self._training)
        training = cast("Training", pickle.loads(copied))  # noqa: S301 - our own, of a moment ago
        return page_of(training, self._inputs, places or {})

    def _changing(self) -> threading.Lock:
        self.num_changes += 1
        return self._lock

    def _measure(self, record: LogRecord) -> None:
        """Note the pace, where some time has passed."""
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
