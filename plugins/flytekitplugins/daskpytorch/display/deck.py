"""What a training's Deck tells of: an observer that keeps it, in bounded memory. Runs in the driver."""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flytekitplugins.daskpytorch.context import LogRecord, SavedCheckpoint
from flytekitplugins.daskpytorch.display.deck_page import State, Training, page_of
from flytekitplugins.daskpytorch.display.metrics import Metrics
from flytekitplugins.daskpytorch.display.pace import Pace
from flytekitplugins.daskpytorch.display.story import Story
from flytekitplugins.daskpytorch.display.training import plain_inputs
from flytekitplugins.daskpytorch.display.usage import Usages
from flytekitplugins.daskpytorch.driver.brain import GangCancelledError
from flytekitplugins.daskpytorch.errors import StoppedEarlyError
from flytekitplugins.daskpytorch.goodput import Goodput, RankUsage
from flytekitplugins.daskpytorch.protocol.observer import Observer, Shape
from flytekitplugins.daskpytorch.report import Curve

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
        self._clock = clock
        self._name = name
        self._inputs = plain_inputs(inputs or {})
        self._story = Story(clock)
        self._metrics = Metrics()
        self._usages = Usages(self._story.began_at)
        self._goodput: Goodput | None = None
        self._checkpoints: Sequence[SavedCheckpoint] = ()
        self._record: LogRecord | None = None
        """Rank 0's newest."""
        self._rate = Pace()
        self._pace = Curve()
        self._paced: LogRecord | None = None
        """Record at the newest point of that curve."""
        self._spoilt: set[str] = set()
        self._outcome: State | None = None
        self._failure = ""
        self.num_changes = 0
        """That something was kept; what a display that is up to date has seen."""

    def resumed(self, step: int) -> None:
        """Keep where it starts."""
        with self._changing():
            self._story.tell(f"goes on from the checkpoint of step {step:,} of the attempt before", "good")

    def placed(self, shape: Shape) -> None:
        """Keep the gang's shape."""
        with self._changing():
            self._name = self._name or shape.name
            self._story.placed(shape)
            self._usages.expect(shape.world_size)

    def formed(self, seconds: float) -> None:
        """Keep when."""
        with self._changing():
            self._story.formed()

    def logged(self, record: LogRecord) -> None:
        """Keep rank 0's values."""
        if record.rank != 0:
            return
        record = record.bare()
        with self._changing():
            numbers = record.numbers
            self._metrics.take(record.step, numbers)
            self._measure(record)
            self._look_for_spoilt(record.step, numbers)
            self._record = record

    def kept(self, step: int) -> None:
        """Keep when."""
        with self._changing():
            self._story.kept(step)

    def keeps(self, checkpoints: Sequence[SavedCheckpoint]) -> None:
        """Keep which they are."""
        with self._changing():
            self._checkpoints = checkpoints

    def used(self, usage: RankUsage) -> None:
        """Keep what a rank uses."""
        with self._changing():
            self._usages.take(usage)

    def accounted(self, goodput: Goodput) -> None:
        """Keep where the time went."""
        with self._changing():
            self._goodput = goodput

    def restarting(self, reason: str, step: int | None) -> None:
        """Keep the reason, and drop what will be logged again."""
        with self._changing():
            self._metrics.cut(step)
            self._rate.clear()
            self._paced = self._record = None
            self._spoilt.clear()
            self._story.restarting(reason, step)

    def noted(self, text: str) -> None:
        """Keep what was said."""
        with self._changing():
            self._story.noted(text)

    def ended(self, error: Exception | None) -> None:
        """Keep the outcome."""
        self.conclude(error)

    def conclude(self, error: BaseException | None) -> None:
        """Keep how it has ended: the first error counts, and an error more than none."""
        with self._changing():
            if error is None:
                self._outcome = self._outcome or State("done", "good", is_over=True)
                self._story.ended("ended", "good")
            elif not self._failure:
                self._outcome, self._failure = _outcome_of(error)
                self._story.ended_at = None
                self._story.ended(f"{self._outcome.word}: {self._failure}", self._outcome.tone)

    def html(self, places: Mapping[str, str] | None = None) -> str:
        """The Deck's body, as of now.

        Args:
            places: What the run leaves, and where.
        """
        with self._lock:
            training = self._so_far()
        return page_of(training, places or {})

    def _changing(self) -> threading.Lock:
        self.num_changes += 1
        return self._lock

    def _so_far(self) -> Training:
        """A copy of all that the page shows, made quickly: the page is written while the gang goes on."""
        story = self._story
        return Training(
            name=self._name,
            state=self._outcome or self._state(),
            failure=self._failure,
            now=story.ended_at or self._clock(),
            seconds=story.seconds,
            spans=story.spans,
            events=list(story.events),
            restarts=list(story.restarts),
            restart_epochs=self._restart_epochs(),
            shape=story.shape,
            record=self._record,
            epoch=self._metrics.epoch,
            steps_per_second=self._rate.per_second or None,
            newest=dict(self._metrics.newest),
            charts=list(self._metrics.charts()),
            is_crowded=self._metrics.is_crowded,
            pace=self._pace.points,
            usage=list(self._usages.charts()),
            ranks=sorted(self._usages.newest.values(), key=lambda speed: speed.usage.rank),
            goodput=self._goodput,
            inputs=self._inputs,
            checkpoints=list(self._checkpoints),
        )

    def _restart_epochs(self) -> list[float]:
        epochs = (self._metrics.epoch_at(step) for step, _ in self._story.restarts)
        return [epoch for epoch in epochs if epoch is not None]

    def _state(self) -> State:
        if self._story.is_training:
            return State("training", "busy")
        return State(
            "starting again" if self._story.restarts else "starting", "warn" if self._story.restarts else "idle"
        )

    def _measure(self, record: LogRecord) -> None:
        """Note the pace, where some time has passed."""
        self._rate.add(record.time, record.step)
        if self._paced is None or record.step < self._paced.step:
            self._paced = record
        elif record.time - self._paced.time >= PACE_INTERVAL and (steps := self._rate.per_second):
            self._pace.add((record.step, record.time - self._story.began_at, steps))
            self._paced = record

    def _look_for_spoilt(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            if not math.isfinite(value) and name not in self._spoilt and len(self._spoilt) < MAX_SPOILT:
                self._spoilt.add(name)
                self._story.tell(f"{name} is {value:g} at step {step:,}", "bad")


def _outcome_of(error: BaseException) -> tuple[State, str]:
    text = str(error.__cause__ or error) or type(error).__name__
    if isinstance(error, StoppedEarlyError):
        return State("stopped early", "warn", is_over=True), text
    if isinstance(error, (KeyboardInterrupt, GangCancelledError)):
        return State("interrupted", "warn", is_over=True), text
    return State("failed", "bad", is_over=True), text
