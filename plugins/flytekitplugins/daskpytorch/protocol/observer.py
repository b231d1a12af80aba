"""Those who watch a gang without taking part: the interface that the progress display and the report have."""

from __future__ import annotations

from dataclasses import dataclass

from flytekitplugins.daskpytorch.context import LogRecord
from flytekitplugins.daskpytorch.protocol.placement import Node, Place

__all__ = ["Observer", "Shape"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A gang as it was formed."""

    name: str
    backend: str
    nodes: list[Node]
    places: list[list[Place]]
    """For each node its ranks."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return sum(len(here) for here in self.places)


class Observer:
    """Hears of what happens in a gang, on the supervisor's thread. Every method may be left as it is.

    `logged` may raise a `StoppedEarlyError`, once; it ends the gang.
    """

    def placed(self, shape: Shape) -> None:
        """The agents are there and the ranks are being started."""

    def formed(self, seconds: float) -> None:
        """All ranks have met, this long after the gang was asked for."""

    def wrote(self, rank: int, lines: list[str]) -> None:
        """A rank wrote lines to its output."""

    def logged(self, record: LogRecord) -> None:
        """A rank called `log`."""

    def kept(self, step: int) -> None:
        """A checkpoint of this step is safe with the driver."""

    def restarting(self, reason: str, step: int | None) -> None:
        """The gang starts again, after this, from the checkpoint of that step; None: from the beginning."""

    def noted(self, text: str) -> None:
        """Something happened that a user should read."""

    def ended(self, error: Exception | None) -> None:
        """All ranks are gone."""
