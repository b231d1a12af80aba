"""Memory is bounded: no part of the driver keeps more records, however much the ranks log."""

import gc
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import pytest
from rich.console import Console

from flytekitplugins.daskpytorch.display import run_state, terminal, tracker
from flytekitplugins.daskpytorch.display.run_state import RunState
from flytekitplugins.daskpytorch.display.terminal import Board, Display
from flytekitplugins.daskpytorch.display.tracker import Run, State, Tracker
from flytekitplugins.daskpytorch.driver.parts.goodput import _Training
from flytekitplugins.daskpytorch.protocol.journal import Logged, Shape, Training
from flytekitplugins.daskpytorch.records import LogRecord
from told import To, usage

FEW, FACTOR = 8_000, 4
"""Of what is told: after so many nothing may grow any more, though as many times as many follow."""
UNCOUNTED = (ModuleType, type, FunctionType, BuiltinFunctionType, threading.Thread)


@pytest.fixture(autouse=True)
def few_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_state, "MAX_RECORDS", 100)
    monkeypatch.setattr(run_state, "MAX_NAMES", 100)


def num_objects(root: object) -> int:
    """How many objects are reachable from this one, but for code."""
    seen, waiting = {id(root): root}, [root]
    while waiting:
        for each in gc.get_referents(waiting.pop()):
            if id(each) not in seen and not isinstance(each, UNCOUNTED):
                seen[id(each)] = each
                waiting.append(each)
    return len(seen)


def assert_bounded(told: object, tell: Callable[[int], object], few: int = FEW, looks: int = 1) -> None:
    """Tell something often, and see that not more is kept of much than of little.

    `looks`: how often to count each time, where another thread has objects that are gone at the next look.
    """
    spans = range(few), range(few, FACTOR * few)
    most_of_few, most_of_many = (most_kept(told, tell, span, looks) for span in spans)
    assert most_of_many < 1.1 * most_of_few


def most_kept(told: object, tell: Callable[[int], object], numbers: range, looks: int) -> int:
    most = 0
    for number in numbers:
        tell(number)
        if number % (len(numbers) // 20) == 0:
            most = max(most, min(num_objects(told) for _ in range(looks)))
    return most


def record(step: int, metrics: Mapping[str, Any]) -> LogRecord:
    return LogRecord(rank=0, step=step, num_steps=1 << 20, time=float(step), metrics=metrics)


def usual(step: int) -> LogRecord:
    return record(step, {"loss": 1.0 / (1 + step), "val_loss": float(step % 7), "epoch": step // 2, "phase": "warm"})


def with_names_of_its_own(step: int) -> LogRecord:
    return record(step, {"loss": 0.5, f"gradients/{step}": float("nan") if step % 3 else 1.0})


def of_epochs(step: int) -> LogRecord:
    return record(step, {"epoch": step, "accuracy": 0.5})


RECORDS = [usual, with_names_of_its_own, of_epochs]


@pytest.mark.parametrize("made", RECORDS)
def test_records_in_the_deck(made: Callable[[int], LogRecord]) -> None:
    deck = RunState(name="m.train")
    assert_bounded(deck, lambda step: To(deck).logged(made(step)))
    assert [record.step for record in deck.records] == [*range(FACTOR * FEW - 100, FACTOR * FEW)]


def test_records_in_a_terminal() -> None:
    with Path(os.devnull).open("w") as file:
        display = Display(Board(Console(file=file, force_terminal=True, width=120)), "m.train", has_outcome=True)
        To(display).formed(1.0)
        try:
            # Every other record has a line.
            assert_bounded(display, lambda step: display.on_event(Logged(record=usual(step))), few=1_000, looks=5)
        finally:
            To(display).ended(None)


def test_what_else_a_deck_is_told() -> None:
    deck = RunState(name="m.train")
    To(deck).placed(Shape(name="m.train", backend="gloo", nodes=[], places=[]))

    def tell(number: int) -> None:
        seconds = {"stepping": float(number)}
        To(deck).used(usage(number % 5, float(number), number, seconds=seconds, memory=number, gpu_memory=number))
        To(deck).noted(f"m.train: something happened for the {number}th time")
        To(deck).kept(number)
        if number % 10 == 0:
            To(deck).restarting(f"worker {number} was lost", number)
            To(deck).formed(1.0)

    assert_bounded(deck, tell)


def test_output_of_ranks_while_a_debugger_has_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "MAX_HELD", 100)
    display = Display(Board(Console(file=None, quiet=True)))
    To(display).debugging(1)
    assert_bounded(display, lambda number: To(display).wrote(0, [f"line {number}"]))


class Deaf(Run):
    """A tracker whose server takes nothing."""

    label = "deaf"

    def __init__(self) -> None:
        self.is_over = threading.Event()

    def open(self, training: Training, config: Mapping[str, Any], step: int | None) -> None:
        self.is_over.wait()

    def log(self, record: LogRecord) -> None:
        """Nothing comes so far."""

    def close(self, state: State, reason: str | None) -> None:
        """Nothing to do."""


def test_records_that_wait_for_a_tracker(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(tracker, "MAX_WAITING", 100)
    run = Deaf()
    deaf = Tracker(run)
    To(deaf).begins(Training(name="m.train", id="train"))
    To(deaf).placed(Shape(name="m.train", backend="gloo", nodes=[], places=[]))
    assert_bounded(deaf, lambda step: To(deaf).logged(usual(step)))
    run.is_over.set()
    To(deaf).ended(None)
    assert f"{FACTOR * FEW - 99} records were dropped" in capsys.readouterr().err


def test_checkpoints_in_the_account_of_time() -> None:
    account = _Training()

    def save(step: int) -> None:
        account.at_saves[step] = {"stepping": float(step)}
        account.keep(step)

    assert_bounded(account, save)
