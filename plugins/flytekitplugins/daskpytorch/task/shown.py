"""Display, page and file places of a gang of a task or of `dispatch`, and tables in notebooks. Runs in the driver."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flytekitplugins.daskpytorch.display import notebook
from flytekitplugins.daskpytorch.display.logged import Log
from flytekitplugins.daskpytorch.display.terminal import ProgressDisplay
from flytekitplugins.daskpytorch.display.training import amounts
from flytekitplugins.daskpytorch.process.system import optional

if TYPE_CHECKING:
    from flytekitplugins.daskpytorch.display.deck import Recorder
    from flytekitplugins.daskpytorch.display.machine import MachineLog
    from flytekitplugins.daskpytorch.protocol.host import StoragePaths
    from flytekitplugins.daskpytorch.protocol.observer import Observer
    from flytekitplugins.daskpytorch.results import TaskResults
    from flytekitplugins.daskpytorch.task.local_runs import LocalRun


MAX_ROWS = 10
"""Maximum number of rows. Earlier calls of the same cell are not shown."""


# ---- Tables of the calls of a gang that stays: one in each cell of a notebook, with a row for each call


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


# ---- The gang


@dataclass(frozen=True, kw_only=True)
class Shown:
    """Objects that show a training: display, recorder of its page, and observers."""

    display: ProgressDisplay | MachineLog
    recorder: Recorder
    """Observer that records the training, and writes the page of its Deck."""
    observers: list[Observer]
    """Observers from the gang's settings, and the observer for Weights & Biases if the config has it."""
    run: LocalRun | None
    """Folder of the user with the training's checkpoints. None: no such folder."""
    _is_over: threading.Event = field(default_factory=threading.Event)
    _tables: list[threading.Thread] = field(default_factory=list)
    _calls: CallTables = field(default_factory=CallTables)

    def show_table(self) -> None:
        """In a notebook, show a table with state, step and metrics in the cell that runs now, until `conclude`."""
        with optional("showing the notebook's table"):
            if notebook.is_notebook():
                table = notebook.LiveTable(functools.partial(_table_of, self.recorder))
                self._tables.append(table.follow(self._is_over.wait))

    def show_call(self, row: CallRow) -> Callable[[str], object]:
        """In a notebook, show a staying gang's call in the table of the cell that runs now.

        Returns:
            Function that ends the row's updates. Its argument is the call's outcome in a word.
        """
        with optional("showing the notebook's table"):
            if notebook.is_notebook():
                return self._calls.show(row)
        return lambda _: None

    @contextlib.contextmanager
    def output_here(self) -> Iterator[None]:
        """In a notebook, show all lines of the block after the block, in the cell that runs now.

        A kernel may show a line in the cell that has started the line's thread: the gang's first cell.
        """
        if not isinstance(self.display, ProgressDisplay) or not notebook.is_notebook():
            yield
            return
        board = self.display.board
        board.hold(is_held=True)
        try:
            yield
        finally:
            board.hold(is_held=False)

    def places(self) -> dict[str, str]:
        """Return places of the training's checkpoints, log files and tracker pages, by name such as `checkpoints`.

        Log files on other machines are left out.
        """
        has_checkpoint = self.run is not None and self.run.newest_step() is not None
        left = {"checkpoints": str(self.run.folder)} if self.run is not None and has_checkpoint else {}
        shape = self.recorder.story.shape
        if shape is not None and shape.log_folder is not None and Path(shape.log_folder).is_dir():
            left["logs"] = shape.log_folder
        for observer in self.observers:
            with contextlib.suppress(Exception):  # any exception of a user's observer
                left |= observer.places()
        return left

    def conclude(self, how: str, places: Mapping[str, str] | None = None) -> None:
        """Show how the training has ended, where its files are, and how the user goes on from its checkpoint.

        Args:
            how: Outcome: `done`, or another word.
            places: Paths and URLs in addition to those of `places`, by name.
        """
        self._is_over.set()
        advice = self.run.advice() if self.run is not None and how != "done" else None
        self.display.conclude(how, {**(places or {}), **self.places()}, advice)
        for table in self._tables:
            table.join(notebook.UPDATE_TIMEOUT)


@dataclass(frozen=True, kw_only=True)
class ShownTask(Shown):
    """Objects that show a task's training, and the store of the files that the task's ranks submit."""

    results: TaskResults
    _storage: dict[str, str] = field(default_factory=dict)
    """Address of the gang's checkpoints in Flyte's storage, by the place's name. Empty in a local run."""

    def show_storage(self, storage: StoragePaths | None) -> None:
        """Log the address of the gang's checkpoints, which an execution that is aborted shows nowhere else."""
        if self.run is None and storage is not None:
            self._storage["checkpoints"] = storage.own
            self.display.say(f"its checkpoints: {storage.own}")

    def places(self) -> dict[str, str]:
        """Return paths and URLs of the training's results, checkpoints and tracker pages, by name such as `results`."""
        kept = self._storage if self.recorder.story.checkpoints else {}
        return ({"results": self.results.folder} if self.results.has_files else {}) | kept | super().places()

    def files(self) -> dict[str, str]:
        """Return paths and URLs of the training's results, checkpoints, tracker pages and of each profile, by name."""
        return self.places() | self.results.profiles()


def _table_of(recorder: Recorder) -> str:
    """Return an HTML table of one gang: name, state, step and the newest value of each metric.

    A gang that stays has the memory of its ranks instead. Its calls have tables of their own.
    """
    with recorder.lock:
        story = recorder.story
        row: dict[str, Any] = {"training": story.name.rpartition(".")[2], "status": story.state.word}
        if not story.stays:
            return notebook.table_of([notebook.row_of(row, story.record, story.metrics.newest)])
        held = sum(amounts(usage)["memory_gib"] for usage in story.usages.values())
    return notebook.table_of([row | ({"memory_gib": held} if held else {})])
