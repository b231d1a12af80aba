"""Golden journals: the same events give the same page, terminal lines and trackers' calls, and the same figures.

`golden_runs.py` in tests/support made the journals by real runs. `pytest --force-regen` makes what is compared anew.
"""

import functools
import io
import itertools
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from distributed import Client
from pytest_regressions.file_regression import FileRegressionFixture
from rich.console import Console

from flytekitplugins.daskpytorch import Gang, Histogram, OpenTelemetry, Wandb, current_rank, dispatch
from flytekitplugins.daskpytorch.__main__ import main
from flytekitplugins.daskpytorch.display import deck, journal_file
from flytekitplugins.daskpytorch.display.journal_file import Journal, run_of
from flytekitplugins.daskpytorch.display.open_telemetry import FIGURES, GangFigures
from flytekitplugins.daskpytorch.display.run_state import RunState, watched
from flytekitplugins.daskpytorch.display.terminal import Board, Display
from flytekitplugins.daskpytorch.display.tracker import Run, State, Tracker
from flytekitplugins.daskpytorch.protocol import journal
from flytekitplugins.daskpytorch.protocol.journal import Training
from flytekitplugins.daskpytorch.records import LogRecord
from html_pages import chart_data
from test_open_telemetry import Read, read  # noqa: F401 - a fixture
from told import To, node, record, shape_of, usage
from wandb_file import read_run

GOLDEN = sorted(Path(__file__).parents[1].glob("golden/*.jsonl"))
of_each = pytest.mark.parametrize("file", GOLDEN, ids=[file.stem for file in GOLDEN])


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def events_of(file: Path) -> list[journal.Event]:
    return [journal.event_of(json.loads(line)) for line in file.read_text().splitlines()]


class Calls(Run):
    """Tracker's run that keeps its calls as text."""

    label = "a tracker"

    def __init__(self) -> None:
        self.calls: list[str] = []

    def open(self, training: Training, config: Mapping[str, Any], step: int | None) -> None:
        self.calls.append(f"open {training.id} {dict(config)} from {step}")

    def rewind(self, step: int | None) -> None:
        self.calls.append(f"rewind {step}")

    def log(self, record: LogRecord) -> None:
        self.calls.append(f"log {record.step} {dict(record.metrics)}")

    def close(self, state: State, reason: str | None) -> None:
        self.calls.append(f"close {state} {reason}")


# ---- What is shown


def page_of(file: Path) -> str:
    """The text of the run's page, and the last points of its charts."""
    page = deck.html(run_of(file), {"W&B": "https://wandb.example.com/run"})
    text = re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)
    lines = [line.strip() for line in re.sub(r"<[^>]+>", "\n", text).splitlines()]
    curves = [(data["title"], line) for data in chart_data(page) for line in data["lines"]]
    drawn = [f"{title}, {line['name']}: {line['y'][-3:]}" for title, line in curves]
    return "\n".join(filter(None, [*lines, *drawn]))


def lines_of(events: list[journal.Event]) -> str:
    """Lines of the terminal for a run."""
    text, now = io.StringIO(), [events[0].time]
    display = Display(Board(Console(file=text, width=200, highlight=False)), has_outcome=True)
    observers = watched(RunState(clock=lambda: now[0]), [display])
    with mock.patch.object(time, "monotonic", side_effect=lambda: now[0]):
        for event in events:
            now[0] = event.time
            for observer in observers:
                observer.on_event(event)
        display.conclude("done" if display.state.end is None else display.state.end.word, {"checkpoints": "/runs/a"})
    return text.getvalue()


def calls_of(events: list[journal.Event]) -> str:
    """Calls of a tracker for a run."""
    observers = watched(RunState(), [fed := Tracker(calls := Calls())])
    for event in events:
        for observer in observers:
            observer.on_event(event)
    fed._worker.flush(60)  # if the run has no end
    return "\n".join(calls.calls)


def figures_of(events: list[journal.Event]) -> str:
    """Figures for OpenTelemetry, just before the end of a run."""
    gang = GangFigures()
    gang.attributes = {}
    for event in events:
        if not isinstance(event, journal.Ended):
            gang.state.on_event(event)
    samples = [(each.name, *sample) for each in FIGURES for sample in gang.samples(each)]
    return "\n".join(f"{name} {' '.join(labels.values())} {value:.10g}" for name, labels, value in samples)


@of_each
def test_page_terminal_and_tracker_show_the_run(file: Path, file_regression: FileRegressionFixture) -> None:
    events = events_of(file)
    shown = {"page": page_of(file), "terminal": lines_of(events), "tracker": calls_of(events)}
    shown["OpenTelemetry"] = figures_of(events)
    text = "\n\n".join(f"---- {where}\n{what.rstrip()}" for where, what in shown.items())
    file_regression.check(f"{text}\n", fullpath=file.with_suffix(".txt"))


@of_each
def test_an_event_is_the_same_when_it_is_read_again(file: Path) -> None:
    for line in file.read_text().splitlines():
        assert journal.fields_of(journal.event_of(json.loads(line))) == json.loads(line)


def test_odd_numbers_are_read_again_without_drawings() -> None:
    event = journal.Logged(record=record(3, loss=float("inf"), note="nan or so"))
    drawn = journal.Logged(record=record(3, **event.record.metrics, w=Histogram.of([1.0, 2.0])))
    fields = json.loads(json.dumps(journal.fields_of(drawn)))
    assert replace(journal.event_of(fields), time=event.time) == event


# ---- One figure, one value


def trained(experiment: dict[str, float]) -> float:
    for step in range(12):
        loss = (step - 8) ** 2 + experiment["floor"]
        current_rank().log({"loss": loss, "epoch": step // 11}, step=step, num_steps=13)
        time.sleep(0.01)
    return loss


@pytest.mark.timeout(120)
def test_one_run_has_the_same_figures_wherever_it_is_shown(
    client: Client,
    tmp_path: Path,
    read: Read,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("DASKPYTORCH_JOURNAL", str(tmp_path))
    monkeypatch.setenv("DASKPYTORCH_PRICE", "core=3600")
    wandb = Wandb(project="names", mode="offline", dir=str(tmp_path))
    gang = Gang(observers=(OpenTelemetry(),))
    [future] = dispatch.map(client, trained, [{"floor": 0.5}], workers=2, wandb=wandb, gang=gang)
    assert future.result() == 9.5
    [file] = tmp_path.glob("*.jsonl")
    run, exported = run_of(file), read()
    [of_wandb] = map(read_run, tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    shown = deck.figures(run)
    line = re.search(r"epoch 1  step 11/13  loss ([\d.]+)  ([\d.]+) steps/s", capfd.readouterr().err)
    assert line is not None
    newest = {
        "terminal": float(line[1]),
        "futures": future.metrics["loss"],
        "Deck": shown["loss"],
        "OpenTelemetry": exported["daskpytorch_metric", "trained", "0", "loss"],
        "Weights & Biases": of_wandb["history"][-1]["loss"],
    }
    assert newest == dict.fromkeys(newest, 9.5)
    assert line[2] == f"{shown['steps per second']:.2g}"
    assert future.step == shown["step"][0] == exported["daskpytorch_step", "trained", "0"] == 11  # type: ignore[index]
    best = min(record.metrics["loss"] for record in future.records)
    assert best == min(row["loss"] for row in of_wandb["history"]) == 0.5
    assert "best 0.5 at 8" in deck.html(run)
    account = future.goodput.as_dict()
    assert of_wandb["summary"]["goodput"]["stepping"] == account["stepping"]
    assert run.goodput == future.goodput
    assert exported["daskpytorch_bill", "trained", "0", "cost"] == future.goodput.cost > 0
    assert future.goodput.cost == pytest.approx(3600 * future.goodput.core_hours)
    assert of_wandb["summary"]["goodput"]["cost"] == pytest.approx(future.goodput.cost, rel=0.5)
    assert exported["daskpytorch_goodput_seconds", "trained", "0", "stepping"] == account["stepping"]


def chatter(num_steps: int) -> float:
    """Return the number of log calls in a second."""
    began_at = time.monotonic()
    for step in range(num_steps):
        current_rank().log({"loss": 1 / (1 + step)}, step=step)
    return num_steps / (time.monotonic() - began_at)


def test_of_a_rank_that_logs_as_fast_as_it_can_no_record_is_lost(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DASKPYTORCH_JOURNAL", str(tmp_path))
    calls = Calls()
    gang = Gang(workers=1, observers=(lambda: Tracker(calls),))
    futures = dispatch.run(client, chatter, 30_000, gang=gang)
    [rate] = futures.result()
    assert [each.step for each in futures.records] == [*range(30_000)]
    dropped = re.search(r"a tracker: too slow; (\d+) records were dropped", capfd.readouterr().err)
    assert len([call for call in calls.calls if "loss" in call]) + int(dropped[1] if dropped else 0) == 30_000
    [file] = tmp_path.glob("*.jsonl")
    assert run_of(file).values.metrics == futures.metrics == {"loss": 1 / 30_000}
    print(f"{rate:,.0f} calls of log a second")


# ---- The file


def journal_with(folder: Path, *told_of: Any) -> Path:
    writer = Journal(folder, "journal.jsonl")
    To(writer).begins(Training(name="flows.train", id="train-1"))
    for tell in told_of:
        tell(To(writer))
    return folder / "journal.jsonl"


def test_a_torn_last_line_is_left_out_and_another_bad_line_is_named(tmp_path: Path) -> None:
    file = journal_with(tmp_path, lambda to: to.placed(shape_of(node())), lambda to: to.formed(1.0))
    whole = file.read_text()
    file.write_text(whole[:-20])
    assert run_of(file).phase.word == "no end recorded"
    assert run_of(file).forming is None
    file.write_text("no event\n" + whole)
    with pytest.raises(ValueError, match="line 1 is no event"):
        run_of(file)


def test_each_event_is_in_the_file_at_once_without_the_records_and_output_of_other_ranks(tmp_path: Path) -> None:
    writer = Journal(tmp_path, "journal.jsonl")  # still open, as in a driver that is killed
    To(writer).begins(Training(name="flows.train", id="train-1"))
    To(writer).logged(record(1, rank=1, loss=1.0))
    To(writer).wrote(0, ["a line"])
    To(writer).formed(1.0)
    lines = (tmp_path / "journal.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["began", "formed"]


def test_each_record_of_a_short_run_is_in_its_journal_also_if_many_arrive_together(tmp_path: Path) -> None:
    def log(to: To) -> None:
        to.observers[0].clock = lambda: time.time() + 600
        for step in range(30):
            to.logged(record(step, time=0.2 * step, loss=1.0))

    assert [each.step for each in run_of(journal_with(tmp_path, log)).records] == [*range(30)]


def test_a_long_run_has_a_short_journal_with_its_newest_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_file, "MAX_LINES", 100)
    monkeypatch.setattr(journal_file, "MAX_USAGES", 10)

    def log(to: To) -> None:
        to.observers[0].clock = functools.partial(next, itertools.count(time.time()))
        to.placed(shape_of(node()))
        for step in range(10_000):
            to.logged(record(step, time=3.0 * step, loss=1 / (1 + step)))
            to.used(usage(0, num_steps=step))
            if step % 1_000 == 999:
                to.logged(record(step, time=3.0 * step, val_loss=2 / (1 + step)))
        to.ended(None)

    run = run_of(file := journal_with(tmp_path, log))
    assert len(file.read_text().splitlines()) < 1_000
    assert (run.values.metrics, run.usages[0].num_steps) == ({"loss": 1 / 10_000, "val_loss": 2 / 10_000}, 9_999)
    assert [each.step for each in run.records if "val_loss" in each.metrics] == [*range(999, 10_000, 1_000)]


def test_the_newest_local_run_is_shown_where_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DASKPYTORCH_CHECKPOINTS", str(tmp_path))
    assert main(["show"]) == 1
    assert "has a journal" in capsys.readouterr().err
    for age, name in enumerate(("newer", "older")):
        (folder := tmp_path / name / "20261128-120000-0a1b2c").mkdir(parents=True)
        writer = Journal(folder, "journal.jsonl")
        To(writer).begins(Training(name=f"flows.{name}", id="train-1"))
        To(writer).logged(record(7, loss=0.5))
        os.utime(folder / "journal.jsonl", (1000 - age, 1000 - age))  # still open, as in a driver that was killed
    page = tmp_path / "page.html"
    assert main(["show", "--page", str(page)]) == 0
    said = capsys.readouterr().out
    assert "newer: no end recorded" in said
    assert re.search(r"step +7", said), said
    assert "no end is recorded" in page.read_text()
