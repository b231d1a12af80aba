"""Tables of a staying gang's calls: one in each cell of a notebook, with a row for each call. Runs in the driver."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flytekitplugins.daskpytorch.display import notebook

if TYPE_CHECKING:
    from flytekitplugins.daskpytorch.display.logged import Log

MAX_ROWS = 10
"""Maximum number of rows. Earlier calls of the same cell are not shown."""
TIMEOUT = 5.0
"""Timeout, in seconds, for the last update of a table."""


@dataclass
class CallRow:
    """Row of one call."""

    name: str
    """Name of the function."""
    log: Log
    """Log records of the call."""
    has_begun: Callable[[], bool]
    """Returns True once the ranks run the call."""
    outcome: str = ""
    """Outcome in a word. Empty before the call's end."""

    def cells(self) -> dict[str, Any]:
        """Return the row's cells, by column: name, status, step and the newest value of each metric."""
        status = self.outcome or ("running" if self.has_begun() else "waiting")
        name = self.name.rpartition(".")[2]
        return notebook.row_of(
            {"call": name, "status": status}, next(iter(self.log.records[-1:]), None), self.log.newest
        )


class CallTables:
    """Tables of one gang's calls."""

    def __init__(self) -> None:
        self._cell = 0
        self._rows: deque[CallRow] = deque(maxlen=MAX_ROWS)

    def show(self, row: CallRow) -> Callable[[str], None]:
        """Add a call to the table of the cell that runs now.

        Returns:
            Function that ends the row's updates. Its argument is the call's outcome in a word.
        """
        if (cell := notebook.running_cell()) != self._cell:
            self._cell, self._rows = cell, deque(maxlen=MAX_ROWS)
        self._rows.append(row)
        if len(self._rows) == 1:
            self._table = notebook.LiveTable(functools.partial(_html, self._rows))
        is_over = threading.Event()
        thread = self._table.follow(is_over.wait)

        def end(outcome: str) -> None:
            row.outcome = outcome
            is_over.set()
            thread.join(TIMEOUT)

        return end


def _html(rows: Sequence[CallRow]) -> str:
    return notebook.table_of([row.cells() for row in list(rows)])
