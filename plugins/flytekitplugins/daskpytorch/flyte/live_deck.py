"""A training's Deck while it trains: kept up to date by a thread of its own. Runs in the driver."""

import contextlib
import contextvars
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path

from flytekit import Deck
from flytekit.core.context_manager import ExecutionState, FlyteContext, FlyteContextManager
from flytekit.deck.deck import DECK_FILE_NAME, _get_deck

from flytekitplugins.daskpytorch import report
from flytekitplugins.daskpytorch.display.deck import Recorder

__all__ = ["TITLE", "move_to_live_file", "published"]

TITLE = "Training"
"""The Deck's name among those of the task; it is the first."""
INTERVAL = 3.0
"""Seconds from one look at what has changed to the next."""
SHARE = 0.02
"""The part of this thread's time that goes into writing and sending; a page that takes long is made more rarely."""
MAX_INTERVAL = 60.0
MAX_WAIT = 30.0
"""Seconds at the end for what is just being sent."""
HEADERS = {"ContentType": "text/html", "content_type": "text/html"}
"""For S3, and for Google's storage; as flytekit sends its Decks."""

logger = logging.getLogger("flytekitplugins.daskpytorch")
_live_file: ContextVar[Path | None] = ContextVar("daskpytorch.live_deck", default=None)


class _TrainingDeck(Deck):  # type: ignore[misc]
    """What the recorder tells, whenever it is asked; from the training's end on always the same."""

    def __init__(self, recorder: Recorder, places: Callable[[], Mapping[str, str]]) -> None:
        super().__init__(TITLE, auto_add_to_deck=False)
        self._recorder = recorder
        self._places = places

    @property
    def html(self) -> str:
        return self._html or self._recorder.html(self._places())

    def freeze(self) -> None:
        try:
            self._html = self._recorder.html(self._places())
        except Exception as error:  # no training fails because of what is shown of it
            logger.warning("the Deck could not be written; the training's outcome stands", exc_info=error)
            self._html = report.page(report.alert("This page could not be written", repr(error)))


@contextlib.contextmanager
def published(recorder: Recorder, places: Callable[[], Mapping[str, str]]) -> Iterator[Path | None]:
    """Make the training's Deck the task's first, and publish it all along, however the training ends.

    Args:
        recorder: What hears of the training.
        places: Says what the training leaves, and where.

    Yields:
        The file, where it is one of this machine, to be opened and reloaded.
    """
    ctx = FlyteContextManager.current_context()
    deck, decks = _TrainingDeck(recorder, places), ctx.user_space_params.decks
    decks[:] = [deck, *(other for other in decks if other.name != TITLE)]
    publisher = _Publisher(ctx, recorder)
    _live_file.set(publisher.file if publisher.is_local else None)
    publisher.start()
    try:
        yield _live_file.get()
    except BaseException as error:
        recorder.conclude(error)
        raise
    finally:
        publisher.end()
        deck.freeze()


def move_to_live_file(written: Path) -> None:
    """Have the file that flytekit wrote in the end take the place of the one that was there all along."""
    live = _live_file.get()
    if live is not None and live != written:
        written.replace(live)
        _live_file.set(None)


class _Publisher:
    """Writes all Decks that there are to one file, over and over, and on a backend to where Flyte's console finds it.

    Not by `Deck.publish`: it leaves a new file on the disk each time, and finds no task on another thread.
    """

    def __init__(self, ctx: FlyteContext, recorder: Recorder) -> None:
        self._ctx = ctx
        self._recorder = recorder
        self._over = threading.Event()
        self._has_failed = False
        self._thread = threading.Thread(
            target=contextvars.copy_context().run, args=(self._publish_all,), name="daskpytorch-deck", daemon=True
        )
        self.file = Path(ctx.file_access.get_random_local_directory(), DECK_FILE_NAME)
        state = ctx.execution_state
        self.is_local = state is None or state.mode != ExecutionState.Mode.TASK_EXECUTION

    def start(self) -> None:
        """Publish from now on; a local file is there at once, while storage need not answer."""
        if self.is_local:
            self._publish()
        self._thread.start()

    def end(self) -> None:
        """Publish no more: flytekit publishes the last one, which nothing may overwrite."""
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
            page = _get_deck(self._ctx.user_space_params, ignore_jupyter=True)
            beside = self.file.with_suffix(".new")
            beside.write_text(page, encoding="utf-8", errors="replace")
            beside.replace(self.file)  # whoever reloads sees a whole page
            if not self.is_local:
                self._ctx.file_access.put_data(str(self.file), self._remote_path(), **HEADERS)
        except Exception as error:  # a full disk, a storage that does not answer, another Deck's error
            if not self._has_failed:
                logger.warning("the Deck so far could not be published (%r); the training goes on", error)
            self._has_failed = True

    def _remote_path(self) -> str:
        """Where a backend looks for the Deck."""
        prefix, access = self._ctx.user_space_params.output_metadata_prefix, self._ctx.file_access
        return f"{prefix}{access.sep(access.get_filesystem_for_path(prefix))}{DECK_FILE_NAME}"
