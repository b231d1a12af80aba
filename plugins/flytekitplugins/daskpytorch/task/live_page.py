"""The page of a training that is kept up to date while it trains, by a thread of its own. Runs in the driver."""

import contextvars
import logging
import threading
import time
from collections.abc import Callable, Mapping

from flytekitplugins.daskpytorch import report
from flytekitplugins.daskpytorch.display.deck import Recorder

TITLE = "Training"
"""The page's name among those of the task; it is the first."""
INTERVAL = 3.0
"""Seconds from one look at what has changed to the next."""
SHARE = 0.02
"""The part of this thread's time that goes into writing and sending; a page that takes long is made more rarely."""
MAX_INTERVAL = 60.0
MAX_WAIT = 30.0
"""Seconds at the end for what is just being sent."""

logger = logging.getLogger("flytekitplugins.daskpytorch")


def page_of(recorder: Recorder, places: Callable[[], Mapping[str, str]]) -> str:
    """What the recorder tells now; no training fails because of what is shown of it."""
    try:
        return recorder.html(places())
    except Exception as error:
        logger.warning("the Deck could not be written; the training's outcome stands", exc_info=error)
        return report.page(report.alert("This page could not be written", repr(error)))


class Publisher:
    """Has a page written, over and over, whenever something has changed."""

    def __init__(self, recorder: Recorder, publish: Callable[[], None]) -> None:
        self._recorder = recorder
        self._write = publish
        self._over = threading.Event()
        self._has_failed = False
        self._thread = threading.Thread(
            target=contextvars.copy_context().run, args=(self._publish_all,), name="daskpytorch-deck", daemon=True
        )

    def start(self, *, at_once: bool) -> None:
        """Publish from now on; `at_once`: and now, before this returns."""
        if at_once:
            self._publish()
        self._thread.start()

    def end(self) -> None:
        """Publish no more: the host publishes the last one, which nothing may overwrite."""
        self._over.set()
        self._thread.join(MAX_WAIT)

    def _publish_all(self) -> None:
        seen, pause = -1, 0.0
        while not self._over.wait(pause):
            pause = INTERVAL
            if self._recorder.num_changes != seen:
                seen, began_at = self._recorder.num_changes, time.monotonic()
                self._publish()
                pause = min(MAX_INTERVAL, max(INTERVAL, (time.monotonic() - began_at) / SHARE))

    def _publish(self) -> None:
        try:
            self._write()
        except Exception as error:  # a full disk, a storage that does not answer, another page's error
            if not self._has_failed:
                logger.warning("the Deck so far could not be published (%r); the training goes on", error)
            self._has_failed = True
