"""The page of a training that is kept up to date while it trains, by a thread of its own. Runs in the driver."""

import contextlib
import contextvars
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping

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


@contextlib.contextmanager
def kept_up_to_date(recorder: Recorder, publish: Callable[[], None], *, at_once: bool) -> Iterator[None]:
    """Have a training's page written over and over, whenever something has changed.

    The host writes the last page, which nothing may overwrite, after this has ended.

    Args:
        recorder: Hears of the training.
        publish: Writes the page.
        at_once: Write the page once before the training begins.
    """
    is_over = threading.Event()
    write = _Write(publish)
    work = functools.partial(contextvars.copy_context().run, _write_all, recorder, write, is_over)
    thread = threading.Thread(target=work, name="daskpytorch-deck", daemon=True)
    if at_once:
        write()
    thread.start()
    try:
        yield
    except BaseException as error:
        recorder.conclude(error)
        raise
    finally:
        is_over.set()
        thread.join(MAX_WAIT)


def _write_all(recorder: Recorder, write: Callable[[], None], is_over: threading.Event) -> None:
    seen, pause = -1, 0.0
    while not is_over.wait(pause):
        pause = INTERVAL
        if recorder.num_changes != seen:
            seen, began_at = recorder.num_changes, time.monotonic()
            write()
            pause = min(MAX_INTERVAL, max(INTERVAL, (time.monotonic() - began_at) / SHARE))


class _Write:
    """Writes the page; the first failure is said, and none is raised."""

    def __init__(self, publish: Callable[[], None]) -> None:
        self._publish = publish
        self._has_failed = False

    def __call__(self) -> None:
        try:
            self._publish()
        except Exception as error:  # a full disk, a storage that does not answer, another page's error
            if not self._has_failed:
                logger.warning("the Deck so far could not be published (%r); the training goes on", error)
            self._has_failed = True
