"""The display of a training, in a terminal and without one."""

import contextlib
import io
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TextIO

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

import any_records
import told
from flytekitplugins.daskpytorch.display import terminal as terminal_display
from flytekitplugins.daskpytorch.display.run_state import RunState
from flytekitplugins.daskpytorch.display.terminal import MAX_LINE, Board, Display
from flytekitplugins.daskpytorch.errors import GangError
from flytekitplugins.daskpytorch.records import Goodput, LogRecord
from flytekitplugins.daskpytorch.sweep.sweep import SweepDisplay
from told import To, node, shape_of

SHAPE = shape_of(node("tcp://10.0.0.1:1", "h1"), node("tcp://10.0.0.2:1", "h2"))
record = partial(told.record, num_steps=8)


def begun(console: Console, clock: Callable[[], float] = time.time) -> Display:
    """A display of a gang whose ranks have met."""
    display = Display(Board(console), has_outcome=True)
    display.state = RunState(clock=clock)
    To(display).placed(SHAPE)
    To(display).formed(0.5)
    return display


@pytest.mark.parametrize(("is_terminal", "tab"), [(False, "\t"), (True, "      ")])
def test_a_ranks_output_stays_as_it_is(*, is_terminal: bool, tab: str) -> None:
    text = io.StringIO()
    board = Board(Console(file=text, force_terminal=is_terminal, width=40, highlight=False))
    To(Display(board)).wrote(1, ["step:100:\tloss :x: " + "=" * 60])
    assert text.getvalue() == f"[rank 1] step:100:{tab}loss :x: {'=' * 60}\n"


def steps_of_lines(records: list[LogRecord]) -> list[int]:
    """Steps of the permanent lines in a terminal."""
    console = Console(file=(text := io.StringIO()), force_terminal=True, width=200, color_system=None)
    display = Display(Board(console), has_outcome=True)
    To(display).placed(SHAPE)
    To(display).formed(0.5)
    display.board.bars.stop()  # only permanent lines are written
    for each in records:
        To(display).logged(each)
    return [int(step) for step in re.findall(r"train: .*?step (\d+)", text.getvalue())]


STEPS = {"loss": 1.0, "lr": 0.1}


@pytest.mark.parametrize(
    ("records", "steps"),
    [
        pytest.param(
            [record(n, epoch=n // 4, **(STEPS if n % 4 < 3 else {"val_loss": 1.0})) for n in range(16)],
            [0, 3, 7, 11, 15],
            id="steps, then a validation",
        ),
        pytest.param([record(n, epoch=n, loss=1.0) for n in range(4)], [0, 1, 2, 3], id="one record an epoch"),
        pytest.param(
            [record(n, epoch=n // 4, **(STEPS if n % 2 else {"loss": 1.0})) for n in range(12)],
            [0, 4, 8],
            id="a metric now and then",
        ),
        pytest.param([record(n, loss=1.0) for n in range(12)], [], id="no epochs"),
    ],
)
def test_a_terminal_gets_one_line_for_each_epoch_or_held_out_metric(records: list[LogRecord], steps: list[int]) -> None:
    assert steps_of_lines(records) == steps


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The display's time, of which a test says how it goes on."""
    now = [1000.0]
    monkeypatch.setattr(terminal_display.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(("num_steps", "left"), [(8, "8 s"), (2_000, "1 h 6 min"), (200_000, "4.6 days")])
def test_eighty_columns_hold_name_step_loss_pace_and_what_is_left(
    clock: list[float], num_steps: int, left: str
) -> None:
    console = Console(file=io.StringIO(), get_time=lambda: clock[0], color_system=None, force_terminal=True, width=80)
    display = begun(console, lambda: clock[0])
    for step in range(4):  # of two seconds each
        To(display).logged(record(step, num_steps=num_steps, time=clock[0], epoch=2, loss=0.25, accuracy=0.5))
        clock[0] += 2.0
    live = display.board.bars.get_renderable()
    To(display).ended(None)
    with console.capture() as capture:
        console.print(live)
    [line] = capture.get().splitlines()
    assert line.startswith(("train  ", "train ━"))
    assert f" epoch 2  step 3/{num_steps}  loss 0.25  0.5 steps/s  {left}" in line
    assert len(line) <= 80


def test_the_live_display_goes_at_a_restart_and_comes_back_when_the_ranks_have_met_again() -> None:
    display = begun(Console(file=(text := io.StringIO()), force_terminal=True, width=200, highlight=False))
    To(display).logged(record(3, loss=0.25))
    To(display).restarting("rank 1: its worker was lost", 4)
    before = text.tell()
    To(display).logged(record(3, loss=0.25))
    To(display).placed(SHAPE)
    assert "━" not in text.getvalue()[before:]
    To(display).formed(0.5)
    To(display).logged(record(3, loss=0.125))
    display.board.bars.refresh()
    To(display).ended(None)
    assert "━" in text.getvalue()[before:]
    assert "loss 0.125" in text.getvalue()[before:]


# ---- What cannot be written, and odd records -------------------------------------------------------------------------


def full_disk() -> TextIO:
    return Path("/dev/full").open("w", buffering=1)


def broken_pipe() -> TextIO:
    read, write = os.pipe()
    os.close(read)
    return os.fdopen(write, "w", buffering=1)


def closed() -> TextIO:
    with Path(os.devnull).open("w") as file:
        return file


@pytest.mark.parametrize("broken", [full_disk, broken_pipe, closed, lambda: None])
@pytest.mark.parametrize("is_terminal", [False, True])
def test_nothing_is_raised_where_nothing_can_be_written(
    broken: Callable[[], TextIO | None],
    *,
    is_terminal: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    monkeypatch.setattr(terminal_display.Screen, "isatty", lambda _: is_terminal, raising=False)
    monkeypatch.setattr(sys, "stderr", file := broken())
    board = Board()
    assert board.is_live == is_terminal
    for observer in (Display(board, has_outcome=True), Display(board, "model 0", "model 0, ")):
        To(observer).formed(0.5)
        To(observer).wrote(1, ["a line"])
        To(observer).logged(record(3, loss=0.25))
        To(observer).ended(ValueError("no good"))
    if file is not None:
        with contextlib.suppress(OSError):
            file.close()
    assert raised == []
    assert capfd.readouterr() == ("", "")  # standard output, too, is still the user's own


ODD_NAMES = ["", "[bold]", "\\", "\x1b[2J", "a\nb", "x" * 10_000, "\ud800"]
RECORDS = any_records.records(ODD_NAMES)


@settings(max_examples=50)
@given(records=st.lists(RECORDS, max_size=5))
@example(records=[record(0, epoch=number, loss=number) for number in any_records.ODD_NUMBERS])
@example(records=[record(step, num_steps=num_steps) for step in (-5, 0, 2**62) for num_steps in (-5, 0, 3, 2**62)])
@example(records=[record(0, **dict.fromkeys([*ODD_NAMES, "loss"], 1.0)), record(0, loss=1.0, note="x" * 100_000)])
@pytest.mark.parametrize("terminal", [False, True])
def test_any_records_can_be_shown(terminal: bool, records: list[LogRecord]) -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=200, highlight=False, color_system=None)
    board = Board(console)
    for observer in (Display(board, has_outcome=True), Display(board, "model 0", "model 0, ")):
        To(observer).placed(SHAPE)
        To(observer).formed(0.5)
        try:
            for each in records:
                To(observer).logged(each)
                console.print(board.bars)  # as its thread does
        finally:
            To(observer).ended(None)
    assert "\x1b[2J" not in text.getvalue()  # of a name, which would clear the screen
    assert terminal or all(line.isprintable() and len(line) < 2 * MAX_LINE for line in text.getvalue().split("\n"))


def test_failed_gang_is_named_in_a_line_though_nobody_asks_for_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    gang_error = GangError("rank 1 of 2 failed on w (host h): ValueError: empty\n\nTraceback of rank 1:\n...")
    own = ValueError("empty")
    own.__cause__ = gang_error
    for error, total in ((gang_error, 6.6), (own, 0.0), (None, 0.0), (KeyError("something else"), 80.0)):
        display = Display(Board(is_quiet=True), "train")
        To(display).accounted(Goodput(total=total, stepping=60.0, starting=20.0))
        To(display).ended(error)
    assert capsys.readouterr().err.splitlines() == [
        *(["train failed: rank 1 of 2 failed on w (host h): ValueError: empty"] * 2),
        "train failed: KeyError: 'something else'",
        "train: goodput 75 %: 60.0 s of 80.0 s stepping; starting 20.0 s",  # of a run of a minute or more
    ]


def test_the_display_steps_aside_for_a_debugger_and_comes_back() -> None:
    display = begun(Console(file=(text := io.StringIO()), force_terminal=True, width=200, highlight=False))
    bars = display.board.bars
    To(display).debugging(1)
    shown = text.getvalue()
    To(display).wrote(0, ["said meanwhile"])
    To(display).logged(record(0, loss=1.0))
    assert text.getvalue() == shown
    assert not bars.live.is_started
    To(display).debugging(None)
    assert "[rank 0] said meanwhile" in text.getvalue()
    To(display).logged(record(1, loss=1.0))
    assert bars.live.is_started
    To(display).ended(None)


def test_a_terminal_shows_the_call_of_a_gang_that_stays_or_that_it_is_idle() -> None:
    display = Display(Board(Console(file=io.StringIO(), width=200, force_terminal=True)), "gang", has_outcome=True)
    To(display).placed(SHAPE)
    To(display).formed(0.5)
    To(display).calling("flows.train")
    [line] = display.board.bars.tasks
    assert (line.fields["name"], line.fields["text"]) == ("train", "")
    To(display).called("flows.train", None)
    assert (line.fields["name"], line.fields["text"]) == ("gang", "idle")
    To(display).ended(None)


def test_models_of_a_sweep_have_plain_lines_with_their_names() -> None:
    """Three models: one ends well, one fails, and one is still there."""
    text = io.StringIO()
    board = SweepDisplay(3, Console(file=text, width=160, highlight=False))
    lines = [board.line(index, {"lr": 0.1 * index, "[tag]": "x" * 60}) for index in range(3)]
    for line in lines:
        To(line).formed(0.1)
    for step in range(4):
        To(lines[0]).logged(record(step, epoch=1 + step // 2, loss=1.0))
        To(lines[0]).logged(record(step, rank=1, epoch=1, loss=77.0))
    To(lines[0]).wrote(1, ["[brackets] stay"])
    To(lines[0]).ended(None)
    To(lines[1]).noted("train: going on from step 4")
    To(lines[1]).ended(ValueError("no good\nreally"))
    shown = text.getvalue().splitlines()
    label = "{'lr': 0.0, '[tag]': 'xxxxxxxxxxxxxxxxxxxxxxxxx…"
    assert shown[0] == f"model 0 {label}: epoch 1  step 0/8  loss 1"
    assert shown[1] == f"model 0 {label}: epoch 2  step 2/8  loss 1"
    assert shown[2:4] == ["[model 0, rank 1] [brackets] stay", "model 1, train: going on from step 4"]
    assert shown[4].startswith("model 1 {'lr': 0.1")
    assert shown[4].endswith("failed: ValueError: no good")
    assert len(shown) == 5


def test_models_that_have_only_begun_in_an_earlier_call_are_no_ended_ones() -> None:
    text = io.StringIO()
    SweepDisplay(4, Console(file=text, width=160)).restored([], "s3://bucket/sweep")
    assert text.getvalue() == "0 of 4 models have ended before, as s3://bucket/sweep has it\n"
