"""Spans of time and events of a gang, in their order, for the Deck's timeline."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from flytekitplugins.daskpytorch.display.training import count, size_of
from flytekitplugins.daskpytorch.driver.brain import GROWS
from flytekitplugins.daskpytorch.protocol.observer import Shape
from flytekitplugins.daskpytorch.report import Event, Span, Tone

MAX_EVENTS = 2_000
"""Maximum number of events that are kept. Each further event replaces one in the middle."""
MAX_SPANS = 400
WORKERS, RANKS, TRAINING = "waiting for workers", "ranks start", "training"


@dataclass
class Story:
    """Events and spans of a gang since the request for the gang."""

    clock: Callable[[], float] = time.time
    events: list[Event] = field(default_factory=list)
    num_attempts: int = 1
    shape: Shape | None = None
    restarts: list[tuple[int, str]] = field(default_factory=list)
    """Step (0: from the beginning) and reason of each restart."""
    _spans: list[Span] = field(default_factory=list)
    _kept: tuple[int, int] | None = None
    """Checkpoints since the last other event: step of the first one, and their number."""

    def __post_init__(self) -> None:
        self.began_at = self._since = self.clock()
        self._now: tuple[str, Tone] | None = (WORKERS, "idle")
        self.ended_at: float | None = None

    @property
    def now(self) -> float:
        """Time of the end, or the present time before the end (seconds since the epoch)."""
        return self.ended_at or self.clock()

    @property
    def seconds(self) -> float:
        """Seconds since the request for the gang, up to the end."""
        return self.now - self.began_at

    @property
    def spans(self) -> list[Span]:
        """Past spans and the present one."""
        return [*self._spans, *([self._current()] if self._now is not None else [])]

    @property
    def is_training(self) -> bool:
        """True while the ranks train: after they have met, and before a restart or the end."""
        return self._now is not None and self._now[0] == TRAINING

    def tell(self, text: str, tone: Tone = "idle") -> None:
        """Add an event whose heading is the first line of the text."""
        heading, _, detail = text.strip().partition("\n")
        self._append(Event(time=self.clock(), text=heading, detail=detail.rstrip(), tone=tone))
        self._kept = None

    def placed(self, shape: Shape) -> None:
        """Record that workers are present and that their ranks start."""
        text = size_of(shape)
        before = self.shape.world_size if self.shape is not None else shape.world_size
        if shape.world_size < before:
            self.tell(f"shrunk: {text}, where there were {count(before, 'rank')}", "warn")
        elif shape.world_size > before:
            self.tell(f"grown: {text}, where there were {count(before, 'rank')}", "good")
        else:
            self.tell(f"starting {text}")
        self.shape = shape
        self._enter((RANKS, "warn"))

    def formed(self) -> None:
        """Record that all ranks have met."""
        self.tell("all ranks have met", "good")
        self._enter((TRAINING, "busy"))

    def kept(self, step: int) -> None:
        """Record a committed checkpoint. Consecutive checkpoints are one event."""
        first, count = self._kept or (step, 0)
        if count:
            self.events.pop()
        text = f"{count + 1:,} checkpoints, of steps {first:,} to {step:,}" if count else f"checkpoint of step {step:,}"
        self._append(Event(time=self.clock(), text=text, tone="good"))
        self._kept = (first, count + 1)

    def restarting(self, reason: str, step: int | None) -> None:
        """Record the end of an attempt and its reason. Another attempt follows."""
        start = f"from step {step:,}" if step is not None else "from the beginning, since no checkpoint was saved"
        grows = reason.startswith(GROWS)
        self.tell(f"starts again {start}: {reason}", "good" if grows else "bad")
        self.restarts = [*self.restarts, (step or 0, reason.partition("\n")[0])][-MAX_SPANS:]
        self.num_attempts += 1
        self._enter((WORKERS, "idle"))

    def noted(self, text: str) -> None:
        """Record a notice, unless `restarting` has recorded the same."""
        words = text.partition(": ")[2] or text
        if words.startswith("going on from ") or (self.restarts and words.startswith(self.restarts[-1][1])):
            return
        self.tell(words)

    def ended(self, text: str, tone: Tone) -> None:
        """Record the end of the gang. Only the first call counts."""
        if self.ended_at is None:
            self.tell(text, tone)
            self.ended_at = self.clock()
            self._enter(None)

    def _current(self) -> Span:
        text, tone = self._now or ("", "idle")
        return Span(start=self._since, end=self.now, text=text, tone=tone)

    def _enter(self, now: tuple[str, Tone] | None) -> None:
        if self._now is not None:
            self._spans = [*self._spans, self._current()][-MAX_SPANS:]
        self._since, self._now = self.clock(), now

    def _append(self, event: Event) -> None:
        self.events.append(event)
        if len(self.events) > MAX_EVENTS:
            del self.events[MAX_EVENTS // 2]
