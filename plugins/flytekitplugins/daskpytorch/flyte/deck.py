"""Deck of a task: the training's live page beside flytekit's own tabs. Runs in the driver."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

from flytekit import Deck
from flytekit.core.context_manager import FlyteContext, FlyteContextManager
from flytekit.deck.deck import DECK_FILE_NAME, _get_deck

from flytekitplugins.daskpytorch.display import journal_file
from flytekitplugins.daskpytorch.display.deck import TITLE, kept_up_to_date
from flytekitplugins.daskpytorch.flyte.context import is_on_backend, outcome_kept

if TYPE_CHECKING:
    from flytekitplugins.daskpytorch.task.run import Shown

HEADERS = {"ContentType": "text/html", "content_type": "text/html"}
FONTS = re.compile(r"<link [^>]*fonts\.googleapis\.com[^>]*>")

local_file: ContextVar[Path | None] = ContextVar("daskpytorch.deck", default=None)
"""None on Flyte's backend, and until the task makes a Deck."""


def published(shown: Shown) -> AbstractContextManager[None]:
    """Keep a Deck with the training's page up to date, as the first Deck of the task.

    On Flyte's backend, the gang's journal is uploaded with the Deck.
    """
    ctx = FlyteContextManager.current_context()
    decks, file = ctx.user_space_params.decks, _DeckFile(ctx)

    def show(page: str) -> None:
        decks[:] = [Deck(TITLE, page, auto_add_to_deck=False), *(other for other in decks if other.name != TITLE)]

    if not file.is_local:
        shown.journal_folder = file.path.parent
    # A local file is there before the training, too.
    return kept_up_to_date(shown.state, shown.places, show, file.write, at_once=file.is_local)


def write_local(ctx: FlyteContext) -> None:
    """On Flyte's backend, flytekit writes the file."""
    with outcome_kept():
        if (file := _DeckFile(ctx, local_file.get())).is_local:
            file.write()


class _DeckFile:
    """HTML file with all Decks of a task, on Flyte's backend uploaded for the console.

    `Deck.publish` is no substitute: it leaves a new file on the disk each time, and fails in threads other than the
    task's.
    """

    def __init__(self, ctx: FlyteContext, path: Path | None = None) -> None:
        self._ctx = ctx
        self.path = path or Path(ctx.file_access.get_random_local_directory(), DECK_FILE_NAME)
        self.is_local = not is_on_backend(ctx)
        local_file.set(self.path if self.is_local else None)

    def write(self) -> None:
        """Leave out flytekit's link to fonts from Google."""
        page = FONTS.sub("", _get_deck(self._ctx.user_space_params, ignore_jupyter=True))
        beside = self.path.with_suffix(".new")
        beside.write_text(page, encoding="utf-8", errors="replace")
        beside.replace(self.path)  # a browser that reloads gets a whole page
        if not self.is_local:
            self._ctx.file_access.put_data(str(self.path), self._remote_path(DECK_FILE_NAME), **HEADERS)
            if (journal := self.path.with_name(journal_file.NAME)).exists():
                self._ctx.file_access.put_data(str(journal), self._remote_path(journal_file.NAME))

    def _remote_path(self, name: str) -> str:
        prefix, access = self._ctx.user_space_params.output_metadata_prefix, self._ctx.file_access
        return f"{prefix}{access.sep(access.get_filesystem_for_path(prefix))}{name}"
