"""Those who watch a gang without taking part: the interface that the progress display and the report have."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from flytekitplugins.daskpytorch.blame import StoppedEarlyError
from flytekitplugins.daskpytorch.context import LogRecord
from flytekitplugins.daskpytorch.placement import Node, Place

__all__ = ["Audience", "Observer", "Shape"]

logger = logging.getLogger("flytekitplugins.daskpytorch")


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


class Audience:
    """The observers of one gang. One that fails is left out from then on; the training goes on."""

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._observers = list(observers)

    def tell(self, method: str, *args: object) -> StoppedEarlyError | None:
        """Call a method of all observers; the first wish of one of them to end the gang."""
        wish: StoppedEarlyError | None = None
        for observer in list(self._observers):
            try:
                getattr(observer, method)(*args)
            except StoppedEarlyError as error:
                wish = wish or error
            except Exception as error:  # whatever a display or a user's own code raises
                self._observers.remove(observer)
                self._say_left_out(observer, method, error)
        return wish

    def _say_left_out(self, observer: Observer, method: str, error: Exception) -> None:
        name = type(observer).__name__
        text = f"{name}.{method} failed ({type(error).__name__}: {error}) and is not called any more"
        logger.warning("%s; the training goes on", text, exc_info=error)
        self.tell("noted", text)
