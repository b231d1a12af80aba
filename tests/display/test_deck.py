"""The Deck of a training shows the right content, and its recorder keeps bounded data."""

import math
import re
import threading
import time
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from any_records import records
from clock import Clock
from flytekitplugins.daskpytorch import report
from flytekitplugins.daskpytorch.checks import direction_of
from flytekitplugins.daskpytorch.display.deck import charts_of, html
from flytekitplugins.daskpytorch.display.run_state import MAX_CURVES, MAX_EVENTS, RunState
from flytekitplugins.daskpytorch.errors import GangCancelledError, GangError, StoppedEarlyError
from flytekitplugins.daskpytorch.protocol.journal import Shape
from flytekitplugins.daskpytorch.records import LogRecord, SavedCheckpoint
from flytekitplugins.daskpytorch.report import chart
from flytekitplugins.daskpytorch.report.pieces import shared
from html_pages import ODD_NAMES, Parts
from told import To, node, record, shape_of, usage

Points = list[tuple[float, float]]


def shape(num_workers: int, per_worker: int = 1, *, gpus: int = 0) -> Shape:
    about = {"gpus": tuple(map(str, range(gpus))), "gpu_names": ("H100",) * gpus, "versions": {"torch": "2.9.0"}}
    nodes = (node(f"tcp://10.0.0.{number}:4000", f"node-{number // 2}", **about) for number in range(num_workers))
    return shape_of(*nodes, per_worker=per_worker)


def by_step(recorder: RunState) -> dict[str, Points]:
    """Every line over the steps."""
    return {name: points for chart in charts_of(recorder.curves) for name, points in chart.curves.items()}


def body(recorder: RunState, places: Mapping[str, str] | None = None) -> str:
    """The page without what all pages share, which has been parsed."""
    page = html(recorder, places).replace(shared(), "")
    Parts(page)
    return page


def figures(page: str) -> dict[str, str]:
    return dict(re.findall(r"<dt>(.*?)</dt><dd[^>]*>(.*?)(?:<small>.*?)?</dd>", page))


def state(page: str) -> str:
    return re.findall(r'class="dpt-chip[^>]*>(.*?)<', page)[0]


def events(page: str) -> list[str]:
    """The headings of what happened."""
    return re.findall(r'aria-hidden="true"></span>([^<]+)', page.partition("dpt-events")[2])


# ---- What is kept of the metrics


def test_only_rank_0s_values_are_kept_and_output_leaves_the_page_as_it_is() -> None:
    recorder = RunState()
    To(recorder).wrote(0, ["a line"])
    assert recorder.num_changes == 0  # a live page is written again after each change
    for step in range(3):
        for rank in (1, 0, 2):
            To(recorder).logged(
                record(step, rank=rank, loss=float(rank), note="text", of_1=0.5) if rank else record(step, loss=2)
            )
    assert by_step(recorder) == {"loss": [(0.0, 2.0), (1.0, 2.0), (2.0, 2.0)]}


ENTRIES = st.lists(st.tuples(st.integers(-5, 40), st.integers(-9, 9)), max_size=40)
"""Steps, which may go back, and values; a few times as many as a curve may have points in these tests."""


@settings(max_examples=60)
@given(ENTRIES)
def test_the_lowest_and_the_highest_of_any_values_are_drawn(entries: list[tuple[int, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chart, "MAX_POINTS", 8)
        recorder = RunState()
        for step, value in entries:
            To(recorder).logged(record(step, loss=value))
        points, values = by_step(recorder).get("loss", []), [value for _, value in entries]
    assert len(points) <= 8
    assert set(points) <= set(entries)
    assert {y for _, y in points} >= {pick(values) for pick in (min, max) if values}


@settings(max_examples=60)
@given(st.lists(st.tuples(ENTRIES, st.none() | st.integers(-5, 40)), max_size=4), ENTRIES)
def test_after_any_restarts_nothing_is_drawn_that_was_dropped(
    attempts: list[tuple[list[tuple[int, int]], int | None]], last: list[tuple[int, int]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chart, "MAX_POINTS", 8)
        recorder, kept = RunState(), []
        for entries, resumed in [*attempts, (last, 40)]:
            for step, value in entries:
                To(recorder).logged(record(step, loss=value))
            To(recorder).restarting("why", resumed)
            kept = [entry for entry in [*kept, *entries] if resumed is not None and entry[0] <= resumed]
            points = by_step(recorder).get("loss", [])
            assert len(points) <= 8
            assert set(points) <= set(kept)


def test_a_curve_ends_with_the_newest_value_also_if_thinned() -> None:
    recorder = RunState()
    for step in range(5_000):
        To(recorder).logged(record(step, loss=float(((4_999 - step) * 5 + 3) % 8)))  # the last is no extreme
    To(recorder).logged(record(5_000, loss=3.5, held_out_loss=0.5))
    assert by_step(recorder)["loss"][-1] == (5_000.0, 3.5)
    assert recorder.values.metrics["loss"] == 3.5


@pytest.mark.parametrize(
    ("names", "title"),
    [
        (["loss", "held_out_loss"], "loss"),
        (["loss", "val_loss", "test_loss"], "loss"),
        (["train_loss", "valid_loss"], "loss"),
        (["train/accuracy", "eval/accuracy"], "accuracy"),
        (["train_loss_step", "val_loss_epoch"], "loss"),
        (["loss.train", "loss.val"], "loss"),
        (["eval_loss", "eval_runtime"], None),
        (["test_loss"], "test loss"),
        (["learning_rate", "grad_norm"], None),
        (["value", "evaluation"], None),
    ],
)
def test_what_was_learnt_from_and_what_was_held_out_share_a_chart(names: list[str], title: str | None) -> None:
    recorder = RunState()
    To(recorder).logged(record(0, **dict.fromkeys(names, 1.0)))
    charts = charts_of(recorder.curves)
    if title is None:
        assert [list(chart.curves) for chart in charts] == [[name] for name in names]
    else:
        assert [(chart.title, list(chart.curves)) for chart in charts] == [(title, names)]


LOW = "loss losses val_loss trainloss valLoss Loss/val word_error_rate test/mse MeanSquaredError cer WER val-ppl"
HIGH = "accuracy val_acc top1-acc acc@1 f1 eval/f1_macro F1Score r2 mAP bbox_mAP_50 mIoU val/auc BinaryAUROC"
NEITHER = "lossless error_free neg_log_loss dice_loss score accuracy_drop learning_rate concerns bitmap_size backlog"


@pytest.mark.parametrize(("names", "mode"), [(LOW, "min"), (HIGH, "max"), (NEITHER, None)])
def test_what_is_good_follows_from_the_name(names: str, mode: str | None) -> None:
    assert {name: direction_of(name) for name in names.split()} == dict.fromkeys(names.split(), mode)


# ---- How it is going


def test_the_page_of_a_training_begins_with_how_it_is_going() -> None:
    clock = Clock()
    recorder = RunState(name="flows.train", clock=clock)
    assert state(body(recorder)) == "starting"
    clock.now += 5
    To(recorder).placed(shape(2))
    To(recorder).formed(5.0)
    for step in range(11):
        To(recorder).logged(record(step, num_steps=101, time=2.0 * step, epoch=1, loss=1 / (step + 1)))
    clock.now += 55
    page = body(recorder)
    assert state(page) == "training"
    assert f"as of {time.strftime('%H:%M:%S', time.localtime(clock.now))}" in page
    found = figures(page)
    assert (found["epoch"], found["step"], found["running for"], found["loss"]) == ("1", "10", "1 min", "0.09091")
    assert found["time left"] == "3 min"  # 90 steps at half a step per second
    assert 'aria-valuenow="11"' in page
    assert "best 0.09091 at 10" in page


STOPPED = StoppedEarlyError("others are better", epoch=1, metric="loss", value=2.0)


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (GangError("rank 1 raised ValueError: bad\nTraceback\nits lines", rank=1), "failed"),
        (STOPPED, "stopped early"),
        (GangCancelledError("train was cancelled"), "cancelled"),
    ],
)
def test_the_end_is_said_at_the_top(error: Exception, word: str) -> None:
    recorder = RunState(clock=(clock := Clock()))
    clock.now += 30
    recorder.conclude(error)
    clock.now += 1_000
    page = body(recorder)
    assert (state(page), figures(page)["took"]) == (word, "30 s")
    alerts = re.findall(r'role="alert"><strong>(.*?)</strong>(?:<pre tabindex="0">(.*?)</pre>)?', page, re.DOTALL)
    assert [part for alert in alerts for part in alert if part] == str(error).split("\n", 1)


def test_the_users_own_error_is_told_by_the_gangs_which_says_where() -> None:
    recorder, error = RunState(), ValueError("bad")
    error.__cause__ = GangError("rank 1 on node-0: ValueError: bad")
    To(recorder).ended(error)
    assert "<strong>rank 1 on node-0: ValueError: bad</strong>" in body(recorder)


def test_an_error_after_the_gangs_end_counts_and_the_first_stays() -> None:
    recorder = RunState()
    To(recorder).ended(None)
    recorder.conclude(OSError("the outputs did not arrive"))
    recorder.conclude(ValueError("another"))
    page = body(recorder)
    assert state(page) == "failed"
    assert "the outputs did not arrive" in page
    assert "another" not in page


def test_a_loss_that_is_no_number_is_red() -> None:
    recorder = RunState()
    for step, loss in enumerate([0.5, math.nan, math.nan, math.inf]):
        To(recorder).logged(record(step, loss=loss))
    page = body(recorder)
    assert '<dd class="dpt-bad">inf</dd>' in page.replace("<small>", "</dd><small>")


# ---- What happened


def test_of_many_events_the_first_and_the_last_are_shown() -> None:
    recorder = RunState()
    for number in range(10_000):
        To(recorder).noted(f"event {number}")
    found = events(body(recorder))
    assert (found[0], found[-1], len(found)) == ("event 0", "event 9999", MAX_EVENTS)


# ---- Whatever comes


def test_observers_do_not_wait_while_a_chart_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    To(recorder := RunState()).logged(record(0, loss=1.0))

    def draw(*_: object, **__: object) -> str:
        observing = threading.Thread(target=To(recorder).logged, args=(record(1, loss=0.5),), daemon=True)
        observing.start()
        observing.join(20)
        assert not observing.is_alive()
        return ""

    monkeypatch.setattr(report, "line_chart", draw)
    html(recorder)
    assert len(recorder.records) == 2


def test_a_large_gangs_page_weighs_less_than_a_megabyte() -> None:
    recorder = RunState(name="train", inputs={f"input_{i}": "x" * 100 for i in range(50)}, clock=Clock())
    To(recorder).placed(shape(125, 8, gpus=8))
    To(recorder).formed(9.0)
    for step in range(3_000):
        metrics = {f"layer_{i}/gradient_norm": math.sin(step * i) * 10 ** (i % 9) for i in range(2 * MAX_CURVES)}
        To(recorder).logged(record(step, epoch=step // 100, **metrics))
        if step % 100 == 99:
            To(recorder).logged(
                record(step, epoch=step // 100, **{f"val_{name}": value for name, value in metrics.items()})
            )
            To(recorder).kept(step)
            To(recorder).noted(f"train: a notice\n{'Traceback ' * 1_000}")
    for moment in range(200):
        for rank in range(0, 1_000, 1 if moment > 197 else 100):
            To(recorder).used(usage(rank, 1_000.0 + moment, moment, gpu_memory=40 << 30, gpu_utilization=0.9))
    To(recorder).keeps(
        [SavedCheckpoint(step=i, metrics={"loss": 1.0}, size=10**9, place="s3://" + "x" * 100) for i in range(50)]
    )
    To(recorder).ended(GangError("rank 1 failed\n" + "line\n" * 100_000))
    assert len(body(recorder).encode()) < 930_000
    assert len(html(recorder).encode()) < 1_000_000


RECORDS = records(ODD_NAMES[:8])


@settings(max_examples=60)
@given(heard=st.lists(RECORDS | st.text(), max_size=6))
def test_whatever_is_heard_can_be_shown(heard: list[LogRecord | str]) -> None:
    recorder = RunState()
    for each in heard:
        To(recorder).noted(each) if isinstance(each, str) else To(recorder).logged(each)
    body(recorder).encode()
