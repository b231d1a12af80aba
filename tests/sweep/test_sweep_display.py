"""The display of many models, in a terminal and without one."""

import io
from functools import partial

from rich.console import Console

import told
from flytekitplugins.daskpytorch.sweep.sweep import SweepDisplay
from told import To

record = partial(told.record, num_steps=8)


def board_of(num_models: int, text: io.StringIO, *, terminal: bool = False) -> SweepDisplay:
    return SweepDisplay(num_models, Console(file=text, force_terminal=terminal, width=160, highlight=False))


def shown(*, terminal: bool = False) -> str:
    """Three models: one ends well, one fails, and one is still there."""
    text = io.StringIO()
    board = board_of(3, text, terminal=terminal)
    lines = [board.line(index, {"lr": 0.1 * index, "[tag]": "x" * 60}) for index in range(3)]
    for line in lines:
        To(line).formed(0.1)
    for step in range(4):
        To(lines[0]).logged(record(step, epoch=1 + step // 2, loss=1.0))
        To(lines[0]).logged(record(step, rank=1, epoch=1, loss=77.0))
    board._board.bars.refresh()  # as its thread does ten times a second
    To(lines[0]).wrote(1, ["[brackets] stay"])
    To(lines[0]).ended(None)
    To(lines[1]).noted("train: going on from step 4")
    To(lines[1]).ended(ValueError("no good\nreally"))
    shown = text.getvalue()
    To(lines[2]).ended(None)  # takes the live display away
    return shown


def test_plain_lines() -> None:
    lines = shown().splitlines()
    label = "{'lr': 0.0, '[tag]': 'xxxxxxxxxxxxxxxxxxxxxxxxx…"
    assert lines[0] == f"model 0 {label}: epoch 1  step 0/8  loss 1"
    assert lines[1] == f"model 0 {label}: epoch 2  step 2/8  loss 1"
    assert lines[2:4] == ["[model 0, rank 1] [brackets] stay", "model 1, train: going on from step 4"]
    assert lines[4].startswith("model 1 {'lr': 0.1")
    assert lines[4].endswith("failed: ValueError: no good")
    assert len(lines) == 5


def test_models_that_have_only_begun_in_an_earlier_call_are_no_ended_ones() -> None:
    text = io.StringIO()
    board_of(4, text).restored([], "s3://bucket/sweep")
    assert text.getvalue() == "0 of 4 models have ended before, as s3://bucket/sweep has it\n"


def test_a_terminal_has_a_line_for_each_model_that_trains() -> None:
    text = shown(terminal=True)
    assert "model 2 {'lr': 0.2, '[tag]'" in text
    assert "step 3/8" in text
    assert "failed: ValueError: no good" in text
    assert "77" not in text
