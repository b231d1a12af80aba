"""The display of a training, in a terminal and without one."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from flytekitplugins.daskpytorch import progress
from flytekitplugins.daskpytorch.context import LogRecord
from flytekitplugins.daskpytorch.observer import Shape
from flytekitplugins.daskpytorch.placement import Node, place_ranks
from flytekitplugins.daskpytorch.progress import ProgressDisplay, describe_record
from flytekitplugins.daskpytorch.report import Recorder

NODES = [
    Node(worker=f"tcp://10.0.0.{i}:1", host=f"h{i}", num_cores=4, gpus=(), gpu_names=(), interface=None, versions={})
    for i in (1, 2)
]
SHAPE = Shape(name="flows.train", backend="gloo", nodes=NODES, places=place_ranks(NODES, 1))


def record(step: int, rank: int = 0, num_steps: int | None = 8, **metrics: float) -> LogRecord:
    return LogRecord(rank=rank, step=step, num_steps=num_steps, time=0.0, metrics=metrics)


def shown(*records: LogRecord, terminal: bool = False) -> str:
    text = io.StringIO()
    display = ProgressDisplay(Console(file=text, force_terminal=terminal, width=200, highlight=False))
    display.placed(SHAPE)
    display.formed(0.5)
    for entry in records:
        display.logged(entry)
    display.wrote(1, ["[brackets] stay"])
    display.ended(None)
    return text.getvalue()


def test_a_record_reads_epoch_step_loss_others_rate() -> None:
    text = describe_record(record(3, epoch=2, samples_per_second=12345.6, held_out_loss=2.5, loss=1.23456, seen=100.0))
    assert text == "epoch 2  step 3/8  loss 1.235  held_out_loss 2.5  seen 100  12,346 samples/s"


def test_plain_lines_show_every_epoch_but_not_every_step() -> None:
    lines = shown(
        *[record(step, epoch=1, loss=1.0) for step in range(4)],
        record(4, epoch=1, loss=1.0, held_out_loss=2.0),
        *[record(step, epoch=2, loss=0.5) for step in range(5, 8)],
    ).splitlines()
    steps = [line for line in lines if "step" in line]
    assert [line.split("step ")[1].split("/")[0] for line in steps] == ["0", "4", "5"]
    assert "starting 2 ranks on 2 workers, 2 hosts (CPU, gloo)" in lines[0]
    assert "[rank 1] [brackets] stay" in lines


def test_plain_lines_come_now_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PLAIN_INTERVAL", 0.0)
    assert shown(*[record(step, loss=1.0) for step in range(4)]).count("step") == 4


def test_a_terminal_has_a_live_line_with_epoch_step_loss_and_rate() -> None:
    text = shown(record(3, epoch=1, loss=0.25, samples_per_second=1000.0), terminal=True)
    assert "epoch 1  step 3/8  loss 0.25  1,000 samples/s" in text
    assert "━" in text


def test_other_ranks_are_not_shown() -> None:
    assert "step" not in shown(record(0, rank=1, loss=1.0))


def test_the_report_has_curves_gang_timings_and_the_error() -> None:
    recorder = Recorder()
    recorder.placed(SHAPE)
    recorder.formed(0.5)
    for epoch in (1, 2):
        recorder.logged(record(epoch, epoch=epoch, loss=1 / epoch, held_out_loss=2 / epoch, held_out_accuracy=0.5))
    recorder.ended(ValueError("<spoilt>"))
    html = recorder.html()
    assert html.count("<svg") == 2  # loss with held_out_loss, and accuracy
    assert "tcp://10.0.0.2:1" in html
    assert "ranks have met" in html
    assert "&lt;spoilt&gt;" in html


def test_the_live_display_goes_at_a_restart_and_comes_back_when_the_ranks_have_met_again() -> None:
    text = io.StringIO()
    display = ProgressDisplay(Console(file=text, force_terminal=True, width=200, highlight=False))
    display.placed(SHAPE)
    display.formed(0.5)
    display.logged(record(3, loss=0.25))
    display.restarting("rank 1: its worker was lost", 4)
    before = text.tell()
    display.logged(record(3, loss=0.25))
    display.placed(SHAPE)
    assert "━" not in text.getvalue()[before:]
    display.formed(0.5)
    display.logged(record(3, loss=0.125))
    display.ended(None)
    assert "━" in text.getvalue()[before:]
    assert "loss 0.125" in text.getvalue()[before:]


def test_the_report_names_restarts_with_their_reasons() -> None:
    recorder = Recorder()
    recorder.placed(SHAPE)
    recorder.restarting("rank 1: <lost>", None)
    recorder.placed(SHAPE)
    recorder.ended(None)
    html = recorder.html()
    assert "started again: rank 1: &lt;lost&gt;" in html
    assert html.count("workers ready") == 2
