"""A notebook's table shows a staying gang's newest calls, each with its state, and keeps no ended call in memory."""

from __future__ import annotations

import ast
import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from flytekitplugins.daskpytorch.display import notebook
from flytekitplugins.daskpytorch.display.logged import Log
from flytekitplugins.daskpytorch.driver.parts.calls import Calls, StayingCall
from flytekitplugins.daskpytorch.records import LogRecord
from flytekitplugins.daskpytorch.task import staying
from flytekitplugins.daskpytorch.task.shown import CallRow, CallTables

CELL = 3


class Table:
    """Stands for a table in a notebook. Its threads only wait for the end."""

    def __init__(self, html: Callable[[], str]) -> None:
        self.html, self.threads = html, list[threading.Thread]()

    def follow(self, has_ended: Callable[[float], bool]) -> threading.Thread:
        self.threads.append(threading.Thread(target=has_ended, args=(60.0,), daemon=True))
        self.threads[-1].start()
        return self.threads[-1]

    def rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = ast.literal_eval(self.html())
        return rows


@dataclass
class Shown:
    """The tables of one gang's calls, in the cells that have run."""

    of_gang: Calls = field(default_factory=Calls)
    cell: int = CELL
    cells: CallTables = field(default_factory=CallTables)
    tables: list[Table] = field(default_factory=list)

    def show_call(self, row: CallRow) -> Callable[[str], None]:
        return self.cells.show(row)

    def ask(self, number: int) -> tuple[StayingCall, Log, Callable[[str], Any]]:
        call, log = StayingCall(number=number, name=f"module.f{number}", call=b"", settle=lambda _: None), Log()
        return call, log, staying._show(self, self.of_gang, call, log)  # type: ignore[arg-type]

    def states(self) -> list[str]:
        return [row["status"] for row in self.tables[-1].rows()]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    shown = Shown()

    def table(html: Callable[[], str]) -> Table:
        html()
        shown.tables.append(Table(html))
        return shown.tables[-1]

    monkeypatch.setattr(notebook, "running_cell", lambda: shown.cell)
    monkeypatch.setattr(notebook, "LiveTable", table)
    monkeypatch.setattr(notebook, "table_of", repr)
    return shown


def test_a_row_says_how_far_its_call_is(shown: Shown) -> None:
    (first, log, end), (_, _, cancel) = shown.ask(1), shown.ask(2)
    assert shown.states() == ["waiting", "waiting"]
    shown.of_gang.current = first
    log.logged(LogRecord(rank=0, step=5, num_steps=9, time=0.0, metrics={"loss": 0.5}))
    running = {"call": "f1", "status": "running", "step": "5 of 9", "loss": 0.5}
    assert shown.tables[0].rows()[0] == running
    shown.of_gang.current = None
    end("done")
    assert shown.tables[0].rows() == [running | {"status": "done"}, {"call": "f2", "status": "waiting"}]
    cancel("cancelled")
    for outcome in ("failed", "interrupted"):
        shown.ask(3)[2](outcome)
    assert shown.states() == ["done", "cancelled", "failed", "interrupted"]


def test_a_table_shows_the_last_ten_calls_of_its_cell(shown: Shown) -> None:
    for number in range(12):
        shown.ask(number)
    assert [row["call"] for row in shown.tables[0].rows()] == [f"f{number}" for number in range(2, 12)]
    shown.cell += 1
    shown.ask(12)
    assert [row["call"] for row in shown.tables[1].rows()] == ["f12"]
    assert len(shown.tables) == 2


def test_an_ended_call_is_freed_with_all_records_but_the_last(shown: Shown) -> None:
    call, log, end = shown.ask(1)
    for step in (1, 2):
        log.logged(LogRecord(rank=0, step=step, num_steps=None, time=0.0, metrics={"loss": 1.0 / step}))
    freed = [weakref.ref(call), weakref.ref(log)]
    end("done")
    del call, log, end
    gc.collect()
    assert [ref() for ref in freed] == [None, None]
    assert shown.tables[0].rows() == [{"call": "f1", "status": "done", "step": 2, "loss": 0.5}]
