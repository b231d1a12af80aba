"""Whose debugger has the terminal: one rank's at a time. Pure; runs in the driver."""

from collections.abc import Callable
from dataclasses import dataclass, field

KEPT_FOR = 1.0
"""Seconds for a rank that steps to come back before another has its turn: it may wait for just that one."""


@dataclass
class Prompts:
    """Those of one attempt's ranks."""

    clock: Callable[[], float]
    shown: int | None = None
    """The rank whose prompt is to be seen."""
    debugged: set[int] = field(default_factory=set)
    """Ranks that somebody looks at, or will: they stand still, and the others wait for them."""
    _waiting: list[int] = field(default_factory=list)
    _kept_for: int | None = None
    _kept_until: float = 0.0

    def ask(self, rank: int) -> None:
        """A rank wants the terminal."""
        self.debugged.add(rank)
        self._waiting.append(rank)

    def leave(self, rank: int, *, steps: bool) -> None:
        """A rank goes on; if it steps, it will ask again."""
        if rank == self.shown:
            self.shown = None
        if steps:
            self._kept_for, self._kept_until = rank, self.clock() + KEPT_FOR
        else:
            self.debugged.discard(rank)

    def forget(self, rank: int) -> None:
        """A rank has gone."""
        self._waiting = [other for other in self._waiting if other != rank]
        self.leave(rank, steps=False)

    @property
    def due(self) -> float | None:
        """When somebody else may have the terminal, though nothing happens."""
        return self._kept_until if self._waiting and self.shown is None else None

    def turn(self) -> int | None:
        """The rank that is to have it now, from which it is not taken again; None: nobody else."""
        if self.shown is not None or not self._waiting:
            return None
        is_kept = self._kept_for in self.debugged and self.clock() < self._kept_until
        if is_kept and self._kept_for not in self._waiting:
            return None
        self.shown = self._kept_for if is_kept and self._kept_for is not None else self._waiting[0]
        self._waiting.remove(self.shown)
        return self.shown
