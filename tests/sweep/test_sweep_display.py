"""The display of many models, without a terminal."""

import io
from functools import partial

from rich.console import Console

import told
from flytekitplugins.daskpytorch.sweep.sweep import SweepDisplay
from told import To

record = partial(told.record, num_steps=8)


def board_of(num_models: int, text: io.StringIO) -> SweepDisplay:
    return SweepDisplay(num_models, Console(file=text, width=160, highlight=False))


def test_plain_lines() -> None:
    """Three models: one ends well, one fails, and one is still there."""
    text = io.StringIO()
    board = board_of(3, text)
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
    board_of(4, text).restored([], "s3://bucket/sweep")
    assert text.getvalue() == "0 of 4 models have ended before, as s3://bucket/sweep has it\n"
