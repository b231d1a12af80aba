"""Keeps account of where a gang's time goes. Runs in the driver; knows nothing but what it is told, and the clock.

The driver says what it is in the middle of: starting, training, or waiting. What goes on in a training is divided as
rank 0's ledger has it (`rank.usage`). When an attempt has ended, what came after its newest checkpoint is lost.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

from flytekitplugins.daskpytorch.goodput import Goodput
from flytekitplugins.daskpytorch.protocol.reports import Spent, Used

INTERVAL = 2.0
"""Seconds from one account that observers are given to the next."""
PARTS = tuple(each.name for each in fields(Goodput) if each.name != "total")


@dataclass
class _Training:
    """The attempt in which ranks train, or have trained."""

    span: float = 0.0
    """Seconds that it has taken, by the driver's clock."""
    late: float = 0.0
    """Seconds for which rank 0 had been at work when the driver heard that it is, at least."""
    spent: Mapping[str, float] = field(default_factory=dict)
    """What rank 0's time has gone into, as far as it has said."""
    at_saves: dict[int, Mapping[str, float]] = field(default_factory=dict)
    """The same at each save, by its step; those before one that is safe are forgotten."""
    safe: set[int] = field(default_factory=set)
    """Steps of such since the newest of which it is known what had been done by then; one may be named before that."""

    def hear(self, spent: Mapping[str, float]) -> None:
        """Rank 0 says what its time had gone into when it said so."""
        self.spent = spent
        self.late = max(self.late, math.fsum(spent.values()) - self.span)  # less what this was on its way for

    def keep(self, step: int) -> None:
        """What was saved at this step is safe."""
        self.safe.add(step)
        if step in self.at_saves:
            self.safe = {step}
            while (first := next(iter(self.at_saves))) != step:
                del self.at_saves[first]

    @property
    def kept(self) -> Mapping[str, float] | None:
        """What the time had gone into at the newest save that is safe."""
        return next((spent for step, spent in reversed(self.at_saves.items()) if step in self.safe), None)

    def parts(self, *, is_lost: bool = False) -> dict[str, float]:
        """What its span has gone into; lost: all that no checkpoint holds."""
        has_begun = self.spent.get("stepping") or self.spent.get("data")
        parts, rest = self._fitted(self.spent), "stepping" if has_begun else "preparing"
        if is_lost and has_begun:
            kept = self.kept or {"preparing": self.spent.get("preparing", 0.0)}
            parts, rest = self._fitted(kept), "lost"
        # What has come since, and whatever was on its way.
        parts[rest] = parts.get(rest, 0.0) + max(0.0, self.span - math.fsum(parts.values()))
        return parts

    def _fitted(self, spent: Mapping[str, float]) -> dict[str, float]:
        """The rank's seconds since the driver heard of it; what came before it has counted as the gang's start."""
        spent = {**spent, "preparing": max(0.0, spent.get("preparing", 0.0) - self.late)}
        whole = math.fsum(spent.values())
        scale = min(1.0, self.span / whole) if whole else 0.0
        return {name: scale * seconds for name, seconds in spent.items()}


class Accountant:
    """Of one gang. Whatever it is told, the parts add up to the whole, and none is negative."""

    def __init__(self, asked_at: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._now = clock
        self._since = asked_at
        self._phase: Literal["starting", "training", "waiting"] = "starting"
        self._parts = dict.fromkeys(PARTS, 0.0)
        """Of all that is over."""
        self._training = _Training()
        self._shown_at = asked_at

    @property
    def is_training(self) -> bool:
        """Whether rank 0 is in the middle of its work, and goes on saying what its time goes into."""
        return self._phase == "training"

    def enter(self, phase: Literal["starting", "training", "waiting"]) -> None:
        """What the gang is in the middle of from now on; training: rank 0 has met the others."""
        self._go_on()
        self._phase = phase

    def hear(self, work: Used | Spent) -> None:
        """What rank 0's time has gone into while it trains."""
        if self._phase != "training":
            return
        self._go_on()
        training = self._training
        training.hear(work.usage.seconds if isinstance(work, Used) else work.seconds)
        if isinstance(work, Spent) and work.step is not None:
            training.at_saves[work.step] = work.seconds
        if isinstance(work, Spent) and work.is_last:
            self.enter("waiting")

    def keep(self, step: int) -> None:
        """A checkpoint of this attempt is safe."""
        self._training.keep(step)

    def close(self, *, is_lost: bool) -> None:
        """The attempt is over, and the next one goes on from the newest checkpoint; lost: without what came after."""
        self._go_on()
        for name, seconds in self._training.parts(is_lost=is_lost).items():
            self._parts[name] += seconds
        self._training = _Training()

    def goodput(self) -> Goodput:
        """Where the time has gone so far; what has not been lost yet counts as kept."""
        self._go_on()
        parts = dict(self._parts)
        for name, seconds in self._training.parts().items():
            parts[name] += seconds
        return Goodput(total=math.fsum(parts.values()), **parts)

    def is_due(self) -> bool:
        """Whether observers are to be told again; once."""
        now = self._now()
        if now < self._shown_at + INTERVAL:
            return False
        self._shown_at = now
        return True

    def _go_on(self) -> None:
        now = self._now()
        if self._phase == "training":
            self._training.span += now - self._since
        else:
            self._parts[self._phase] += now - self._since
        self._since = now
