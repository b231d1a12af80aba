"""The observers of one gang, none of whom may harm it. Runs in the driver."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from flytekitplugins.daskpytorch.errors import StoppedEarlyError
from flytekitplugins.daskpytorch.protocol.observer import Observer

__all__ = ["Observers", "logger"]


logger = logging.getLogger("flytekitplugins.daskpytorch")


class Observers:
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
