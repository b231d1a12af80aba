"""State of a run: the one fold of a gang's events, from which all displays take their figures. Runs in the driver.

    Event ─▶ RunState ─▶ terminal, notebook, Deck, futures, OpenTelemetry, trackers' usage metrics

The same events give the same state, so a journal that is read again shows what the run's displays have shown.
"""

import functools
import itertools
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import singledispatchmethod
from typing import Any

from flytekitplugins.daskpytorch.display.training import LABELS, MAX_RANKS, Pace, amounts, count, is_held_out, size_of
from flytekitplugins.daskpytorch.protocol import journal
from flytekitplugins.daskpytorch.protocol.journal import End, Shape
from flytekitplugins.daskpytorch.protocol.observer import Observer
from flytekitplugins.daskpytorch.records import Goodput, LogRecord, RankUsage, SavedCheckpoint
from flytekitplugins.daskpytorch.report import Curve, Tone
from flytekitplugins.daskpytorch.report import Event as PageEvent
from flytekitplugins.daskpytorch.report.chart import MAX_VALUE, Points


@dataclass(frozen=True)
class Phase:
    word: str
    tone: Tone


MAX_RECORDS = 100_000
"""About 46 MB of the driver's memory. Beyond, the oldest are removed."""
MAX_EVENTS = 300
"""The first 150 and the newest stay."""
MAX_RESTARTS = 400
MAX_USAGE_POINTS = 400
MAX_NAMES = 10_000
"""Metrics with a newest value. Names made up at run time beyond it begin anew."""
MAX_VALUES = 200
UNCHARTED = {"epoch", "samples_seen"}
MAX_CURVES = 50
"""Drawn metrics. As many held-out metrics may follow."""
STEPS = "optimizer steps per second"
"""Steps of log records have another chart, since users number them freely."""
TRAINING, IDLE = Phase("training", "busy"), Phase("idle", "idle")
NO_END = Phase("no end recorded", "warn")
TONES: Mapping[str, Tone] = {"done": "good", "failed": "bad"}


@dataclass
class Values:
    record: LogRecord | None = None
    metrics: dict[str, Any] = field(default_factory=dict)

    @property
    def numbers(self) -> dict[str, float]:
        numbers = ((name, float(value)) for name, value in self.metrics.items() if isinstance(value, (int, float)))
        return dict(itertools.islice(numbers, MAX_VALUES))

    def add(self, record: LogRecord) -> None:
        if len(self.metrics.keys() | record.metrics.keys()) > MAX_NAMES:
            self.metrics = {}
        self.metrics = {**self.metrics, **record.metrics}  # a new dictionary, since other threads read the old one
        self.record = self.record if record.is_evaluation else record


@dataclass(kw_only=True, eq=False)
class RunState(Observer):
    """State of one gang's run, from the request for the gang on. `on_event` is thread-safe."""

    name: str = ""
    inputs: Mapping[str, Any] = field(default_factory=dict)
    clock: Callable[[], float] = time.time
    """Seconds since the epoch. For a journal that is read again: time of its last event."""
    before: Sequence[LogRecord] = ()
    """Log records from an earlier call of `dispatch.map`.

    A gang that resumes from a checkpoint restores them up to its step.
    """
    stays: bool = False
    training: journal.Training | None = None
    shape: Shape | None = None
    attempt: int | None = None
    forming: float | None = None
    call: str | None = None
    called_at: float = 0.0
    records: list[LogRecord] = field(default_factory=list)
    """Newest 100,000 log records of rank 0, with numbers and strings."""
    values: Values = field(default_factory=Values)
    rate: Pace = field(default_factory=Pace)
    curves: dict[str, Curve] = field(default_factory=dict)
    """Metrics by step, without values that cannot be drawn, such as NaN."""
    usages: dict[int, RankUsage] = field(default_factory=dict)
    speeds: dict[int, Pace] = field(default_factory=dict)
    """Optimizer steps in the current attempt, by rank. The time before a rank's first batch is left out."""
    goodput: Goodput | None = None
    checkpoints: Sequence[SavedCheckpoint] = ()
    num_checkpoints: int = 0
    checkpoint: tuple[int, float] | None = None
    restarts: list[tuple[int, str]] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    end: End | None = None
    num_changes: int = 0

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self.began_at = self.clock()
        self.ended_at: float | None = None
        self.history: list[PageEvent] = []
        self._phase: Phase | None = None  # while the gang starts
        self._lines: dict[str, dict[str, Curve]] = {}

    # ---- Figures

    @property
    def title(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def now(self) -> float:
        return self.ended_at or self.clock()

    @property
    def phase(self) -> Phase:
        if self.end is not None:
            return Phase(self.end.word, TONES.get(self.end.word, "warn"))
        if self._phase is not None:
            return self._phase
        return Phase("starting again", "warn") if self.restarts else Phase("starting", "idle")

    @property
    def usage_charts(self) -> dict[str, dict[str, Points]]:
        charts = {what: self._lines[what] for what in (STEPS, *LABELS.values()) if what in self._lines}
        return {what: {name: lines[name].points for name in sorted(lines)} for what, lines in charts.items()}

    # ---- The fold

    def on_event(self, event: journal.Event) -> None:
        if is_kept(event):
            with self.lock:
                self._fold(event)
                self.num_changes += 1

    @singledispatchmethod
    def _fold(self, event: journal.Event) -> None:
        pass

    @_fold.register
    def _(self, event: journal.Began) -> None:
        self.training, self.name = event.training, self.name or event.training.name
        self.inputs = event.training.inputs

    @_fold.register
    def _(self, event: journal.Resumed) -> None:
        self.checkpoint = event.step, event.time
        self.cut(self.before, event.step)
        self._tell(event, f"goes on from the checkpoint of step {event.step:,} of the attempt before", "good")

    @_fold.register
    def _(self, event: journal.Placed) -> None:
        before = self.shape.world_size if self.shape is not None else event.shape.world_size
        change = "" if event.shape.world_size == before else f", where there were {count(before, 'rank')}"
        self._tell(event, f"starting {size_of(event.shape)}{change}")
        self.name = self.name or event.shape.name
        self.shape = event.shape
        self.attempt = 0 if self.attempt is None else self.attempt + 1
        self.usages = {}
        self.speeds = {}
        self._phase = None

    @_fold.register
    def _(self, event: journal.Formed) -> None:
        self.forming = event.seconds
        self._tell(event, "all ranks have met", "good")
        self._phase = IDLE if self.stays else TRAINING

    @_fold.register
    def _(self, event: journal.Logged) -> None:
        record = event.record.bare()
        self.records.append(record)
        del self.records[:-MAX_RECORDS]
        self.values.add(record)
        self._draw(record)
        if not record.is_evaluation:
            self.rate.add(record.time, record.step)

    @_fold.register
    def _(self, event: journal.Calling) -> None:
        self.stays = True
        self.call, self.called_at = event.name, event.time
        self.curves = {}
        self.cut(())
        self._tell(event, f"calls {event.name}")
        self._phase = TRAINING

    @_fold.register
    def _(self, event: journal.Called) -> None:
        self.call = None
        if event.end.error:
            self._tell(event, f"{event.name} failed: {event.end.text}", "bad")
        self._phase = IDLE

    @_fold.register
    def _(self, event: journal.Checkpointed) -> None:
        self.num_checkpoints += 1
        self.checkpoint = event.step, event.time

    @_fold.register
    def _(self, event: journal.Listed) -> None:
        self.checkpoints = event.checkpoints

    @_fold.register
    def _(self, event: journal.Used) -> None:
        usage = event.usage
        speed = self.speeds.setdefault(usage.rank, Pace())
        speed.add(usage.time - usage.seconds.get("preparing", 0.0), usage.num_steps)
        self.usages[usage.rank] = usage
        if usage.rank >= MAX_RANKS:
            return
        values = {LABELS[name]: value for name, value in amounts(usage).items()}
        if usage.num_steps and speed.per_second is not None:  # no zeros of a training without an optimizer
            values[STEPS] = speed.per_second
        for what, value in values.items():
            line = self._lines.setdefault(what, {}).setdefault(f"rank {usage.rank}", Curve(MAX_USAGE_POINTS))
            line.add((max(0.0, usage.time - self.began_at), value))

    @_fold.register
    def _(self, event: journal.Accounted) -> None:
        self.goodput = event.goodput

    @_fold.register
    def _(self, event: journal.Restarted) -> None:
        step = event.step
        if event.kind is not None:
            self.failures[event.kind] += 1
        last = -math.inf if step is None else step
        for curve in self.curves.values():
            curve.cut(last)
        self.curves = {name: curve for name, curve in self.curves.items() if curve.points}
        self.cut(self.records, last)
        start = f"from step {step:,}" if step is not None else "without a checkpoint"
        self._tell(event, f"goes on {start}: {event.reason}", "good" if event.kind is None else "bad")
        self.restarts = [*self.restarts, (step or 0, event.reason.partition("\n")[0])][-MAX_RESTARTS:]
        self._phase = None

    @_fold.register
    def _(self, event: journal.Noted) -> None:
        words = event.text
        if words.startswith(("going on from ", "going on without ")) or (
            self.restarts and words.startswith(self.restarts[-1][1])
        ):
            return
        self._tell(event, words)

    @_fold.register
    def _(self, event: journal.Ended) -> None:
        if self.end is not None and (self.end.error or not event.end.error):  # the first error stays
            return
        self.end = event.end
        text = f"{event.end.word}: {event.end.text}" if event.end.error else "ended"
        self._tell(event, text, self.phase.tone)
        self.ended_at = event.time
        self._phase = None

    def _draw(self, record: LogRecord) -> None:
        for name, value in record.numbers.items():
            has_room = name in self.curves or len(self.curves) < MAX_CURVES * (2 if is_held_out(name) else 1)
            if has_room and name not in UNCHARTED and abs(value) <= MAX_VALUE:
                self.curves.setdefault(name, Curve()).add((float(record.step), value))

    def _tell(self, event: journal.Event, text: str, tone: Tone = "idle") -> None:
        heading, _, detail = text.strip().partition("\n")
        self.history.append(PageEvent(time=event.time, text=heading, detail=detail.rstrip(), tone=tone))
        if len(self.history) > MAX_EVENTS:
            del self.history[MAX_EVENTS // 2]

    def conclude(self, error: BaseException | None) -> None:
        self.on_event(journal.Ended(time=self.clock(), end=End.of(error), error=error))

    def note_silence(self) -> None:
        """Note that no further events will come: those of a journal without an end."""
        if self.end is None:
            last = journal.Event(time=self.clock())
            self._tell(last, "no end is recorded: the run goes on elsewhere, or its driver was killed", "warn")
            self._phase = NO_END

    def cut(self, records: Sequence[LogRecord], step: float = math.inf) -> None:
        """Keep those of the records up to a step. All others will be logged again, or belong to the call before."""
        self.records = [record for record in records if record.step <= step]
        values = Values()
        for record in self.records:
            values.add(record)
        self.values = values
        self.rate.clear()


def is_kept(event: journal.Event) -> bool:
    """Return False for output, debuggers' prompts, and log records of other ranks than rank 0."""
    is_of_others = isinstance(event, journal.Logged) and event.record.rank != 0
    return not is_of_others and not isinstance(event, (journal.Wrote, journal.Prompted))


class View(Observer):
    @functools.cached_property
    def state(self) -> RunState:
        """The state of the gang's run, which `watched` sets. Before, an empty one."""
        return RunState()

    def note(self, text: str) -> None:
        self.on_event(journal.Noted(text=text))


def watched(state: RunState, observers: Sequence[Observer]) -> list[Observer]:
    for observer in observers:
        if isinstance(observer, View):
            observer.state = state
    return [state, *observers]


class Logged:
    """Base of futures that also have rank 0's log records, during the training and after its end."""

    _run_state: RunState

    @property
    def records(self) -> list[LogRecord]:
        """The newest 100,000 log records of rank 0, with numbers and strings.

        A restart removes the records that will be logged again.
        """
        return list(self._run_state.records)

    @property
    def metrics(self) -> Mapping[str, Any]:
        """Newest value of each metric, by name."""
        return dict(self._run_state.values.metrics)

    @property
    def step(self) -> int | None:
        """Step of rank 0's last log record. None without records."""
        record = self._run_state.values.record
        return None if record is None else record.step

    @property
    def goodput(self) -> Goodput | None:
        """Account of the gang's time, updated every two seconds during training.

        None before the training, and for a model that an earlier call of `dispatch.map` has completed.
        """
        return self._run_state.goodput
