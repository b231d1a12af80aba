"""Tables of a staying gang's calls: one in each cell of a notebook, with a row for each call. Runs in the driver."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flytekitplugins.daskpytorch.display import notebook
from flytekitplugins.daskpytorch.display.logged import Log

MAX_ROWS = 10
"""Maximum number of rows. Earlier calls of the same cell are not shown."""


@dataclass(eq=False)
class CallRow:
    """Row of one call."""

    name: str
    """Name of the function."""
    log: Log
    """Log records of the call. After the call's end, only the records that the table shows."""
    status: Callable[[], str]
    """Returns the call's status in a word."""

    def end(self, outcome: str) -> None:
        """Set the call's outcome as status. Release the call, and the records that the table does not show."""
        ended = Log()
        ended.records, ended.newest = self.log.records[-1:], self.log.newest
        self.log, self.status = ended, lambda: outcome

    def cells(self) -> dict[str, Any]:
        """Return the row's cells, by column: name, status, step and the newest value of each metric."""
        name = self.name.rpartition(".")[2]
        return notebook.row_of(
            {"call": name, "status": self.status()}, next(iter(self.log.records[-1:]), None), self.log.newest
        )


class CallTables:
    """Tables of one gang's calls."""

    def __init__(self) -> None:
        self._cell = 0
        self._table: _Table | None = None

    def show(self, row: CallRow) -> Callable[[str], None]:
        """Add a call to the table of the cell that runs now.

        Returns:
            Function that ends the row's updates. Its argument is the call's outcome in a word.
        """
        if (cell := notebook.running_cell()) != self._cell or self._table is None:
            self._table, self._cell = _Table(row), cell
        else:
            self._table.rows.append(row)
        return self._table.follow(row)


class _Table:
    """Table of one cell's calls, which one thread updates while a call has not ended."""

    def __init__(self, first: CallRow) -> None:
        self.rows = deque([first], maxlen=MAX_ROWS)
        self._live = notebook.LiveTable(functools.partial(_html, self.rows))
        self._lock = threading.Lock()
        self._open: list[CallRow] = []
        """Rows of the calls that have not ended."""

    def follow(self, row: CallRow) -> Callable[[str], None]:
        """Update the table until the call's end. Return the function that ends the call's row."""
        with self._lock:
            if not self._open:
                self._is_over = threading.Event()
                self._thread = self._live.follow(self._is_over.wait)
            self._open.append(row)
        return functools.partial(self._end, row)

    def _end(self, row: CallRow, outcome: str) -> None:
        row.end(outcome)
        with self._lock:
            self._open.remove(row)
            if self._open:
                return
            self._is_over.set()
            thread = self._thread
        thread.join(notebook.UPDATE_TIMEOUT)


def _html(rows: Sequence[CallRow]) -> str:
    return notebook.table_of([row.cells() for row in list(rows)])
