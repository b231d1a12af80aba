"""A training's Deck while it trains. Runs in the driver."""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path

from flytekit import Deck
from flytekit.core.context_manager import ExecutionState, FlyteContext, FlyteContextManager
from flytekit.deck.deck import DECK_FILE_NAME, _get_deck

from flytekitplugins.daskpytorch.display.deck import Recorder
from flytekitplugins.daskpytorch.task.live_page import TITLE, kept_up_to_date, page_of

HEADERS = {"ContentType": "text/html", "content_type": "text/html"}
"""For S3, and for Google's storage; as flytekit sends its Decks."""
FONTS = re.compile(r"<link [^>]*fonts\.googleapis\.com[^>]*>")

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
        self._html = page_of(self._recorder, self._places)


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
    file = _DeckFile(ctx)
    _live_file.set(file.path if file.is_local else None)
    try:
        with kept_up_to_date(recorder, file.write, at_once=file.is_local):  # where no storage need answer
            yield _live_file.get()
    finally:
        deck.freeze()


def finish(written: Path) -> Path:
    """Have the file that flytekit wrote in the end ask no server, and take the place of the one that followed along.

    Returns:
        The file.
    """
    live = _live_file.get() or written
    _live_file.set(None)
    page = without_fonts(written.read_text(encoding="utf-8", errors="replace"))
    written.write_text(page, encoding="utf-8", errors="replace")
    return written.replace(live)


def without_fonts(page: str) -> str:
    """Return flytekit's page without the link by which its template asks a server of Google's for two fonts."""
    return FONTS.sub("", page)


class _DeckFile:
    """All Decks that there are, in one file, and on a backend where Flyte's console finds it.

    Not by `Deck.publish`: it leaves a new file on the disk each time, and finds no task on another thread.
    """

    def __init__(self, ctx: FlyteContext) -> None:
        self._ctx = ctx
        self.path = Path(ctx.file_access.get_random_local_directory(), DECK_FILE_NAME)
        state = ctx.execution_state
        self.is_local = state is None or state.mode != ExecutionState.Mode.TASK_EXECUTION

    def write(self) -> None:
        page = without_fonts(_get_deck(self._ctx.user_space_params, ignore_jupyter=True))
        beside = self.path.with_suffix(".new")
        beside.write_text(page, encoding="utf-8", errors="replace")
        beside.replace(self.path)  # whoever reloads sees a whole page
        if not self.is_local:
            self._ctx.file_access.put_data(str(self.path), self._remote_path(), **HEADERS)

    def _remote_path(self) -> str:
        """Where a backend looks for the Deck."""
        prefix, access = self._ctx.user_space_params.output_metadata_prefix, self._ctx.file_access
        return f"{prefix}{access.sep(access.get_filesystem_for_path(prefix))}{DECK_FILE_NAME}"
