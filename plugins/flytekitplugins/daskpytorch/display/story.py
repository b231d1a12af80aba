"""Record of a training for the Deck, in bounded memory: spans, events, metrics and usage. Runs in the driver."""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from functools import cached_property

from flytekitplugins.daskpytorch.display.metrics import Chart, Metrics
from flytekitplugins.daskpytorch.display.training import LABELS, MAX_RANKS, Pace, amounts, count, size_of
from flytekitplugins.daskpytorch.driver.brain import GangCancelledError
from flytekitplugins.daskpytorch.driver.parts.workers import GROWS
from flytekitplugins.daskpytorch.errors import StoppedEarlyError
from flytekitplugins.daskpytorch.media import Histogram, Picture
from flytekitplugins.daskpytorch.protocol.observer import HINT_END, GoodputObserver, Shape
from flytekitplugins.daskpytorch.records import LogRecord, RankUsage, SavedCheckpoint
from flytekitplugins.daskpytorch.report import Curve, Event, Span, Tone
from flytekitplugins.daskpytorch.report.chart import Points

MAX_EVENTS = 2_000
"""Maximum number of events that a Deck keeps. Each further event replaces one in the middle."""
MAX_SPANS = 400
MAX_SPOILT = 20
"""Maximum number of metrics whose first NaN or infinity a Deck shows as an event."""
MAX_DRAWINGS = 8
"""Maximum number of pictures and histograms in a Deck."""
MAX_PICTURES = 500_000
"""Maximum number of bytes of a Deck's pictures together. Others are in trackers alone."""
MAX_USAGE_POINTS = 400
"""Maximum number of points of a rank's curve of CPU, memory or GPU usage."""
STEPS = "optimizer steps per second"
"""Title of the chart of optimizer steps. Steps of log records have another chart, since users number them freely."""
WORKERS, RANKS, TRAINING, IDLE = "waiting for workers", "ranks start", "training", "idle"


@dataclass(frozen=True)
class State:
    """State of a training as a Deck shows it: a word or two, and their colour."""

    word: str
    tone: Tone


@dataclass(kw_only=True)
class Story(GoodputObserver):
    """Observer that collects the content of a training's Deck, from the request for the gang on. Not thread-safe."""

    name: str = ""
    clock: Callable[[], float] = time.time
    events: list[Event] = field(default_factory=list)
    shape: Shape | None = None
    restarts: list[tuple[int, str]] = field(default_factory=list)
    """Step (0: from the beginning) and reason of each restart."""
    metrics: Metrics = field(default_factory=Metrics)
    usages: dict[int, RankUsage] = field(default_factory=dict)
    """Newest report of each rank's usage (CPU, memory, GPU, time) in the current attempt, by rank."""
    speeds: dict[int, Pace] = field(default_factory=dict)
    """Optimizer steps per second in the current attempt, by rank. The time before a rank's first batch is left out."""
    hints: list[str] = field(default_factory=list)
    checkpoints: Sequence[SavedCheckpoint] = ()
    stays: bool = False
    """True for a gang that stays, which is idle between its calls."""
    record: LogRecord | None = None
    """Newest log record of rank 0 in the current attempt. None before the first record."""
    drawings: dict[str, tuple[int, Histogram | Picture]] = field(default_factory=dict)
    """Newest picture or histogram of each name that rank 0 has logged, with its step."""
    rate: Pace = field(default_factory=Pace)
    """Steps per second of rank 0, from its newest log records."""
    outcome: State | None = None
    """Final state of the training. None before its end."""
    failure: str = ""
    """Message of the error that ended the training. Empty without an error."""
    _spans: list[Span] = field(default_factory=list)
    _kept: tuple[int, int] | None = None
    """Checkpoints that the newest event stands for: step of the first one, and their number. None: no checkpoints."""
    _lines: dict[str, dict[str, Curve]] = field(default_factory=dict)
    """Curves of the first ranks' usage (CPU, memory, GPU, steps per second), by chart and by rank."""
    _spoilt: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.began_at = self._since = self.clock()
        self._now: tuple[str, Tone] | None = (WORKERS, "idle")
        self.ended_at: float | None = None

    @property
    def now(self) -> float:
        """Time of the training's end, or the present time before the end, in seconds since the epoch."""
        return self.ended_at or self.clock()

    @property
    def seconds(self) -> float:
        """Seconds from the request for the gang to the training's end, or to the present time."""
        return self.now - self.began_at

    @property
    def spans(self) -> list[Span]:
        """Phases of the training for the timeline: all past phases and the present one."""
        return [*self._spans, *([self._current(*self._now)] if self._now is not None else [])]

    @property
    def state(self) -> State:
        """Present state of the training."""
        if self.outcome is not None:
            return self.outcome
        if self._now is not None and self._now[0] in (TRAINING, IDLE):
            return State(*self._now)
        return State("starting again", "warn") if self.restarts else State("starting", "idle")

    @property
    def usage_charts(self) -> dict[str, dict[str, Points]]:
        """Curves of the first ranks' usage over seconds since the request for the gang, by chart and by rank."""
        charts = {what: self._lines[what] for what in (STEPS, *LABELS.values()) if what in self._lines}
        return {what: {name: lines[name].points for name in sorted(lines)} for what, lines in charts.items()}

    @cached_property
    def charts(self) -> Sequence[Chart]:
        """Charts of the logged metrics, computed once. A Deck is drawn from a copy of the story that never changes."""
        return list(self.metrics.charts())

    # ---- What the gang tells

    def resumed(self, step: int) -> None:
        """Record the step of the checkpoint that the gang resumes from."""
        self._tell(f"goes on from the checkpoint of step {step:,} of the attempt before", "good")

    def placed(self, shape: Shape) -> None:
        """Record the gang's size, and that its ranks start."""
        text = size_of(shape)
        before = self.shape.world_size if self.shape is not None else shape.world_size
        if shape.world_size < before:
            self._tell(f"shrunk: {text}, where there were {count(before, 'rank')}", "warn")
        elif shape.world_size > before:
            self._tell(f"grown: {text}, where there were {count(before, 'rank')}", "good")
        else:
            self._tell(f"starting {text}")
        self.name = self.name or shape.name
        self.shape = shape
        self.usages.clear()
        self.speeds.clear()
        self._enter((RANKS, "warn"))

    def formed(self, seconds: float) -> None:
        """Record that all ranks have joined the process group."""
        self._tell("all ranks have met", "good")
        self._enter((IDLE, "idle") if self.stays else (TRAINING, "busy"))

    def logged(self, record: LogRecord) -> None:
        """Record the metrics of rank 0's log record."""
        for name, drawing in record.drawings.items():
            self._draw(name, record.step, drawing)
        record = record.bare()
        numbers = record.numbers
        self.metrics.take(record.step, numbers, is_evaluation=record.is_evaluation)
        if not record.is_evaluation:
            self.record = record
            self.rate.add(record.time, record.step)
        for name, value in numbers.items():
            if not math.isfinite(value) and name not in self._spoilt and len(self._spoilt) < MAX_SPOILT:
                self._spoilt.add(name)
                self._tell(f"{name} is {value:g} at step {record.step:,}", "bad")

    def _draw(self, name: str, step: int, drawing: Histogram | Picture) -> None:
        """Keep a picture or histogram, and drop the oldest ones for which the page has no room."""
        self.drawings.pop(name, None)
        if isinstance(drawing, Histogram) or len(drawing.png) <= MAX_PICTURES:
            self.drawings[name] = step, drawing
        while len(self.drawings) > MAX_DRAWINGS or sum(map(_size_of, self.drawings.values())) > MAX_PICTURES:
            del self.drawings[next(iter(self.drawings))]

    def calling(self, name: str) -> None:
        """Record the begin of a staying gang's call, whose metrics replace those of the call before."""
        self.metrics, self.record, self.drawings = Metrics(), None, {}
        self.rate.clear()
        self._spoilt.clear()
        self._tell(f"calls {name}")
        self._enter((TRAINING, "busy"))

    def called(self, name: str, error: Exception | None) -> None:
        """Record the end of a staying gang's call."""
        if isinstance(error, CancelledError):
            self._tell(f"{name} was interrupted", "warn")
        elif error is not None:
            self._tell(f"{name} raised {type(error).__name__}: {error}", "bad")
        self._enter((IDLE, "idle"))

    def kept(self, step: int) -> None:
        """Record a committed checkpoint. Consecutive checkpoints are one event."""
        first, count = self._kept or (step, 0)
        if count:
            self.events.pop()
        text = f"{count + 1:,} checkpoints, of steps {first:,} to {step:,}" if count else f"checkpoint of step {step:,}"
        self._append(Event(time=self.clock(), text=text, tone="good"))
        self._kept = (first, count + 1)

    def keeps(self, checkpoints: Sequence[SavedCheckpoint]) -> None:
        """Record the list of checkpoints that the gang keeps."""
        self.checkpoints = checkpoints

    def used(self, usage: RankUsage) -> None:
        """Record a rank's newest usage of CPU, memory, GPU and time."""
        speed = self.speeds.setdefault(usage.rank, Pace())
        speed.add(usage.time - usage.seconds.get("preparing", 0.0), usage.num_steps)
        self.usages[usage.rank] = usage
        if usage.rank >= MAX_RANKS:
            return
        values = {LABELS[name]: value for name, value in amounts(usage).items()}
        if speed.per_second is not None:
            values[STEPS] = speed.per_second
        for what, value in values.items():
            line = self._lines.setdefault(what, {}).setdefault(f"rank {usage.rank}", Curve(MAX_USAGE_POINTS))
            line.add((0, max(0.0, usage.time - self.began_at), value))

    def restarting(self, reason: str, step: int | None) -> None:
        """Record the reason for a restart, and drop the values that will be logged again."""
        self.metrics.cut(step)
        self.drawings = {name: each for name, each in self.drawings.items() if step is not None and each[0] <= step}
        self.rate.clear()
        self.record = None
        self._spoilt.clear()
        start = f"from step {step:,}" if step is not None else "without a checkpoint"
        self._tell(f"starts again {start}: {reason}", "good" if reason.startswith(GROWS) else "bad")
        self.restarts = [*self.restarts, (step or 0, reason.partition("\n")[0])][-MAX_SPANS:]
        self._enter((WORKERS, "idle"))

    def noted(self, text: str) -> None:
        """Record a notice as an event, unless `restarting` has recorded the same."""
        words = text.partition(": ")[2] or text
        if words.startswith(("going on from ", "going on without ")) or (
            self.restarts and words.startswith(self.restarts[-1][1])
        ):
            return
        if words.endswith(HINT_END):
            self.hints.append(words.removesuffix(HINT_END).rstrip())
        self._tell(words)

    def ended(self, error: BaseException | None) -> None:
        """Record the training's outcome: success for None, else the error. Errors after the first one are ignored."""
        if error is None and self.outcome is None:
            self._end(State("done", "good"), "ended")
        elif error is not None and not self.failure:
            self.failure = str(error.__cause__ or error) or type(error).__name__
            outcome = _outcome_of(error)
            self._end(outcome, f"{outcome.word}: {self.failure}")

    # ---- How

    def _end(self, outcome: State, text: str) -> None:
        self.outcome = outcome
        self._tell(text, outcome.tone)
        self.ended_at = self.clock()
        self._enter(None)

    def _tell(self, text: str, tone: Tone = "idle") -> None:
        """Add an event whose heading is the first line of the text."""
        heading, _, detail = text.strip().partition("\n")
        self._append(Event(time=self.clock(), text=heading, detail=detail.rstrip(), tone=tone))
        self._kept = None

    def _append(self, event: Event) -> None:
        self.events.append(event)
        if len(self.events) > MAX_EVENTS:
            del self.events[MAX_EVENTS // 2]

    def _enter(self, now: tuple[str, Tone] | None) -> None:
        """End the timeline's present phase, and begin one with this name and colour. None: the training has ended."""
        if self._now is not None:
            self._spans.append(self._current(*self._now))
            del self._spans[:-MAX_SPANS]
        self._since, self._now = self.clock(), now

    def _current(self, text: str, tone: Tone) -> Span:
        return Span(start=self._since, end=self.now, text=text, tone=tone)


def _size_of(drawn: tuple[int, Histogram | Picture]) -> int:
    return len(drawn[1].png) if isinstance(drawn[1], Picture) else 0


def _outcome_of(error: BaseException) -> State:
    if isinstance(error, StoppedEarlyError):
        return State("stopped early", "warn")
    if isinstance(error, (KeyboardInterrupt, GangCancelledError)):
        return State("interrupted", "warn")
    return State("failed", "bad")
