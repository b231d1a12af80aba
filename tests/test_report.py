"""The Deck of a training: what is kept of its records, how it is thinned, and what no name or value can break."""

from __future__ import annotations

import math
import pickle
import re
import warnings
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flytekitplugins.daskpytorch import report
from flytekitplugins.daskpytorch.context import LogRecord, SavedCheckpoint
from flytekitplugins.daskpytorch.display.deck import MAX_CURVES, Recorder
from flytekitplugins.daskpytorch.report import MAX_POINTS, line_chart

Points = list[tuple[float, float]]


def record(step: int, rank: int = 0, **metrics: Any) -> LogRecord:
    return LogRecord(rank=rank, step=step, num_steps=None, time=0.0, metrics=metrics)


def drawn(recorder: Recorder) -> dict[str, Points]:
    """Every curve of every chart."""
    return {name: points for _, curves, _ in recorder._charts() for name, points in curves.items()}


def fed(values: list[float], name: str = "loss") -> Points:
    recorder = Recorder()
    for step, value in enumerate(values):
        recorder.logged(record(step, **{name: value}))
    return drawn(recorder)[name]


# ---- What is kept ---------------------------------------------------------------------------------------------------


def test_only_rank_0s_values_are_kept() -> None:
    recorder = Recorder()
    for step in range(3):
        for rank in (1, 0, 2):
            recorder.logged(
                record(step, rank=rank, loss=float(rank), note="text", of_1=0.5) if rank else record(step, loss=2)
            )
    assert drawn(recorder) == {"loss": [(0.0, 2.0), (1.0, 2.0), (2.0, 2.0)]}


def test_what_is_kept_does_not_grow_with_the_steps() -> None:
    recorder, sizes = Recorder(), []
    for step in range(40_000):
        recorder.logged(record(step, loss=math.sin(step), held_out_loss=math.cos(step), epoch=step))
        if step + 1 in (10_000, 20_000, 40_000):
            sizes.append(len(pickle.dumps(recorder)))
    assert max(sizes) < 1.1 * min(sizes)


def test_short_curves_are_kept_as_they_are() -> None:
    values = [float(step % 7) for step in range(MAX_POINTS // 2)]
    assert fed(values) == list(enumerate(values))


@pytest.mark.parametrize("num_values", [MAX_POINTS + 1, 2 * MAX_POINTS - 1, 2 * MAX_POINTS, 7_777])
def test_long_curves_have_no_more_points_than_are_meant(num_values: int) -> None:
    points = fed([math.sin(step) for step in range(num_values)])
    assert MAX_POINTS // 4 <= len(points) <= MAX_POINTS
    assert [x for x, _ in points] == sorted(x for x, _ in points)


@pytest.mark.parametrize("value", [9.0, -9.0])
def test_no_spike_is_lost(value: float) -> None:
    values = [math.sin(step) for step in range(7_777)]
    values[5_001] = value
    assert (5_001.0, value) in fed(values)


def test_the_newest_value_of_a_level_curve_is_shown() -> None:
    points = fed([1.0] * 5_000)
    assert points[0] == (0.0, 1.0)
    assert points[-1] == (4_999.0, 1.0)


ENTRIES = st.lists(st.tuples(st.integers(-5, 40), st.integers(-9, 9)), max_size=40)
"""Steps, which may go back, and values; a few times as many as a curve may have points in these tests."""


@settings(max_examples=60, deadline=None)
@given(ENTRIES)
def test_the_lowest_and_the_highest_of_any_values_are_drawn(entries: list[tuple[int, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "MAX_POINTS", 8)
        recorder = Recorder()
        for step, value in entries:
            recorder.logged(record(step, loss=value))
        points, values = drawn(recorder).get("loss", []), [value for _, value in entries]
    assert len(points) <= 8
    assert set(points) <= set(entries)
    assert {y for _, y in points} >= {pick(values) for pick in (min, max) if values}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(ENTRIES, st.none() | st.integers(-5, 40)), max_size=4), ENTRIES)
def test_after_any_restarts_nothing_is_drawn_that_was_dropped(
    attempts: list[tuple[list[tuple[int, int]], int | None]], last: list[tuple[int, int]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "MAX_POINTS", 8)
        recorder, kept = Recorder(), []
        for entries, resumed in [*attempts, (last, 40)]:
            for step, value in entries:
                recorder.logged(record(step, loss=value))
            recorder.restarting("why", resumed)
            kept = [entry for entry in [*kept, *entries] if resumed is not None and entry[0] <= resumed]
            points = drawn(recorder).get("loss", [])
            assert len(points) <= 8
            assert set(points) <= set(kept)


def test_a_restart_drops_what_will_be_logged_again() -> None:
    recorder = Recorder()
    for step in range(10):
        recorder.logged(record(step, loss=float(step), late=1.0) if step > 5 else record(step, loss=float(step)))
    recorder.restarting("rank 1: lost", 3)
    assert drawn(recorder) == {"loss": [(float(step), float(step)) for step in range(4)]}
    recorder.logged(record(4, loss=0.5))
    assert drawn(recorder)["loss"][-2:] == [(3.0, 3.0), (4.0, 0.5)]
    recorder.restarting("rank 1: lost", None)
    assert drawn(recorder) == {}


def test_records_that_sum_up_an_epoch_are_drawn_over_the_epochs() -> None:
    recorder = Recorder()
    for step in range(6):
        recorder.logged(record(step, epoch=1 + step // 3, loss=float(step)))
        if step % 3 == 2:
            recorder.logged(record(step, epoch=1 + step // 3, loss=0.5, held_out_loss=0.25))
    [(title, curves, x_label)] = recorder._charts()
    assert (title, x_label) == ("loss", "epoch")
    assert curves == {"loss": [(1.0, 0.5), (2.0, 0.5)], "held_out_loss": [(1.0, 0.25), (2.0, 0.25)]}
    recorder.restarting("lost", 1)
    assert drawn(recorder) == {"loss": [(0.0, 0.0), (1.0, 1.0)]}


def test_no_more_curves_are_drawn_than_anybody_reads() -> None:
    recorder = Recorder()
    for step in range(4 * MAX_CURVES):
        recorder.logged(record(step, **{f"gradient_{step}": 1.0}))
    assert list(drawn(recorder)) == [f"gradient_{step}" for step in range(MAX_CURVES)]
    recorder._by_step = dict(list(recorder._by_step.items())[:1])  # drawing takes long
    assert f"Only the first {MAX_CURVES} metrics" in recorder.html()


def test_checkpoints_are_a_table() -> None:
    recorder = Recorder()
    assert "Checkpoints" not in recorder.html()
    place = "s3://bucket/<own>/step-3.pt"
    recorder.keeps([SavedCheckpoint(step=1, metrics={}, size=1, place=None)])
    recorder.keeps(
        [
            SavedCheckpoint(step=3, metrics={"loss": 0.123456789, "hits": 2.0}, size=1_234_567, place=place),
            SavedCheckpoint(step=7, metrics={"loss": math.nan}, size=5, place=None),
        ]
    )
    page = recorder.html()
    rows = [re.findall("<td[^>]*>(.*?)</td>", row) for row in re.findall("<tr>(.*?)</tr>", page)]
    assert ["3", "loss 0.123457, hits 2", "1,234,567", "s3://bucket/&lt;own&gt;/step-3.pt"] in rows
    assert ["7", "loss nan", "5", "the driver&#x27;s disk"] in rows
    assert not [row for row in rows if row[:1] == ["1"]]


def test_what_no_chart_can_show_is_left_out() -> None:
    assert fed([1.0, math.nan, math.inf, 10**400, 1.7e308, -1.7e308, 2.0]) == [(0.0, 1.0), (6.0, 2.0)]


# ---- What is drawn --------------------------------------------------------------------------------------------------


def num_drawn(svg: str) -> int:
    """Points of the longest line, as it stands in the SVG."""
    return max(len(re.findall("[ML]", path)) for path in re.findall(r'<path d="([^"]*)" clip-path', svg))


def test_a_chart_of_many_points_is_thinned() -> None:
    svg = line_chart("loss", {"loss": [(float(x), float(x * 7919 % 100)) for x in range(20_000)]}, "step")
    assert MAX_POINTS // 4 < num_drawn(svg) <= MAX_POINTS


ODD_NAMES = [
    "",
    "_private",
    "$",
    "$\\frac{$",
    "cost in $ and $",
    "<script>alert(1)</script>",
    "--></svg><b>",
    "x" * 10_000,
]
ODD_NAMES += ["a\nb", "\x1b[31mred\x1b[0m", "\x00", "\ud800", "&amp;", "損失", "held_out_x", "\u202eback"]


@pytest.mark.filterwarnings("ignore:.*missing from.*font")
def test_no_name_breaks_the_page_or_gets_into_it_unescaped() -> None:
    recorder = Recorder()
    for name in ODD_NAMES:
        recorder.logged(record(0, **{name: 1.0}))
    recorder.ended(ValueError("<b>\ud800"))
    html = recorder.html()
    html.encode()
    assert "<script" not in html
    assert "<b>" not in html
    assert "\x1b" not in html
    assert "x" * 1_000 not in html
    charts = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    assert len(charts) == len(ODD_NAMES)
    for chart in charts:
        ET.fromstring(chart)


NUMBERS = st.one_of(
    st.floats(),
    st.integers(),
    st.booleans(),
    st.sampled_from([10**400, -(10**400), 1e308, -1e308, 5e-324, math.nan, math.inf, -math.inf, -0.0]),
)
NAMES = st.one_of(st.sampled_from(["loss", "epoch", "held_out_loss", "samples_per_second", *ODD_NAMES[:8]]), st.text())
STEPS = st.integers(-(2**63) + 1, 2**63 - 1) | st.integers(-3, 10)
RECORDS = st.builds(
    LogRecord,
    rank=st.integers(0, 1),
    step=STEPS,
    num_steps=st.none() | STEPS,
    time=st.floats(),
    metrics=st.dictionaries(NAMES, NUMBERS | st.text() | st.just("x" * 100_000), max_size=4),
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(records=st.lists(RECORDS, max_size=4))
def test_any_records_can_be_drawn(records: list[LogRecord]) -> None:
    recorder = Recorder()
    for each in records:
        recorder.logged(each)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*missing from.*font")
        recorder.html().encode()
