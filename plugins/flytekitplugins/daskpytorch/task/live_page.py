"""Thread that keeps a training's page up to date during the training. Runs in the driver."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from flytekitplugins.daskpytorch import report
from flytekitplugins.daskpytorch.display import deck

if TYPE_CHECKING:
    from flytekitplugins.daskpytorch.display.run_state import RunState

TITLE = "Training"
"""Name of the Deck or report tab with the training's page."""
INTERVAL = 3.0
"""Interval, in seconds, at which the training's page is checked for changes, and written if it has changed."""
SHARE = 0.02
"""Maximum share of time, from 0 to 1, that writing and uploading the page takes. A slow page is written less often."""
MAX_INTERVAL = 60.0
MAX_WAIT = 30.0
"""Timeout, in seconds, for an upload of the page that is in progress when the training ends."""

logger = logging.getLogger("flytekitplugins.daskpytorch")


@contextlib.contextmanager
def kept_up_to_date(
    state: RunState,
    places: Callable[[], Mapping[str, str]],
    show: Callable[[str], object],
    publish: Callable[[], object],
    *,
    at_once: bool,
) -> Iterator[None]:
    """During the block, show and publish a training's page in a thread whenever it has changed.

    After the block, show the final page, which the caller publishes.

    Args:
        state: State of the run. An exception of the block ends the run.
        places: Function that returns paths and URLs of the training's files, by name.
        show: Function that replaces the page's HTML by its argument.
        publish: Function that writes or uploads the shown page.
        at_once: True: also publish the page before the training begins.
    """
    is_over, has_failed = threading.Event(), threading.Event()

    def write() -> None:
        try:
            show(deck.html(state, places()))
            publish()
        except Exception as error:  # a full disk, a storage that does not answer, another page's error
            if not has_failed.is_set():
                logger.warning("the Deck so far could not be published (%r); the training goes on", error)
            has_failed.set()

    work = functools.partial(contextvars.copy_context().run, _write_all, state, write, is_over)
    thread = threading.Thread(target=work, name="daskpytorch-deck", daemon=True)
    if at_once:
        write()
    thread.start()
    try:
        yield
    except BaseException as error:
        state.conclude(error)
        raise
    finally:
        is_over.set()
        thread.join(MAX_WAIT)
        show(_last_page(state, places))


def _write_all(state: RunState, write: Callable[[], None], is_over: threading.Event) -> None:
    seen, pause = -1, 0.0
    while not is_over.wait(pause):
        pause = INTERVAL
        if state.num_changes != seen:
            seen, began_at = state.num_changes, time.monotonic()
            write()
            pause = min(MAX_INTERVAL, max(INTERVAL, (time.monotonic() - began_at) / SHARE))


def _last_page(state: RunState, places: Callable[[], Mapping[str, str]]) -> str:
    """Return the HTML of the training's page. If writing it fails, return a page with the error."""
    try:
        return deck.html(state, places())
    except Exception as error:
        logger.warning("the Deck could not be written; the training's outcome stands", exc_info=error)
        return report.page(report.alert("This page could not be written", repr(error)))
