"""Pieces of report pages: no name or value breaks them, they stay small, and load nothing."""

import math

import pytest

from flytekitplugins.daskpytorch import report
from flytekitplugins.daskpytorch.report.pieces import brief, shared
from html_pages import ODD_NAMES, Parts, chart_data, rows_of


def every_piece(name: str) -> list[str]:
    """One of each kind, made of this text wherever one may stand."""
    return [
        report.status(name, name, note=name, done=0.5),
        report.alert(name, name),
        report.figures({name: name, f"{name} ": (1.5, name)}),
        report.line_chart(name, {name: [(0, 1.0), (1, 2.0)]}, name, best={name: "min"}, marks=[(0.5, name)]),
        report.table((name,), [(name,)]),
        report.timeline([report.Event(time=0, text=name, detail=name)], start=0),
        report.card(name, report.text(name)),
        report.text(name, quiet=True),
        report.section(name, report.grid(report.text(name)), note=name),
    ]


# ---- A page


@pytest.mark.parametrize("name", ODD_NAMES)
def test_no_text_breaks_the_page_or_gets_into_it_unescaped(name: str) -> None:
    page = report.page(*every_piece(name))
    page.encode()
    parts = Parts(page.replace(shared(), ""))
    assert "img" not in {tag for tag, _ in parts.elements}
    assert not [attrs for _, attrs in parts.elements if any(at.startswith("on") for at in attrs)]
    assert [attrs.get("type") for tag, attrs in parts.elements if tag == "script"] == ["application/json"]
    assert "\x1b" not in page
    assert [data["lines"][0]["y"] for data in chart_data(page)] == [[1, 2]]


def test_a_page_loads_nothing_from_anywhere() -> None:
    page = report.page(*every_piece("loss"), report.table(("run",), [("https://wandb.ai/me/run?a=1&b=2",)]))
    for tag, attributes in Parts(page).elements:
        assert tag not in ("link", "iframe", "object", "embed", "base", "meta")
        assert "src" not in attributes
        assert "href" not in attributes or tag == "a"
    assert "url(" not in page
    assert "@import" not in page
    for call in ("fetch(", "XMLHttpRequest", "import(", "sendBeacon", "WebSocket"):
        assert call not in page
    assert '<a href="https://wandb.ai/me/run?a=1&amp;b=2" target="_blank" rel="noopener noreferrer">' in page


@pytest.mark.parametrize("text", ["javascript:alert(1)", "see https://x.org", "https://x.org/\"onclick='x'", "ftp://x"])
def test_only_an_address_of_the_web_is_a_link(text: str) -> None:
    assert "<a " not in report.table(("where",), [(text,)])


# ---- Charts


@pytest.mark.parametrize("points", [[], [(3, 1.0)], [(0, math.nan), (1, math.inf), (2, -math.inf), (3, 10**400)]])
def test_few_points_and_none_are_drawn_as_they_are(points: list[tuple[float, float]]) -> None:
    chart = report.line_chart("loss", {"loss": points, "other": [(1, 5.0)]}, "step", best={"loss": "min"})
    lines = {line["name"]: line for line in chart_data(chart)[0]["lines"]}
    assert lines["loss"]["x"] == [x for x, y in points if abs(y) < 1e300]
    assert lines["other"]["y"] == [5]
    if not lines["loss"]["x"]:
        assert "<b>no values</b>" in chart


def test_a_chart_says_in_words_what_it_draws() -> None:
    curves = {"loss": [(0, 2.5), (10, 0.25), (20, 0.5)], "val_loss": [(10, 1.0)]}
    chart = report.line_chart("loss", curves, "step", best={"loss": "min"}, marks=[(10, "started again")])
    parts = Parts(chart)
    [plot] = [attributes for _, attributes in parts.elements if attributes.get("class") == "dpt-plot"]
    assert (plot["role"], plot["aria-label"]) == ("img", "loss by step")
    assert "┆ started again at step 10" in chart
    assert chart_data(chart)[0]["lines"][0]["best"] == [10, 0.25]


@pytest.mark.parametrize(
    ("values", "from_zero", "is_log", "may_be"),
    [
        ([1.0, 50.0], False, False, True),
        ([0.001, 50.0], False, True, True),
        ([0.0, 50.0], False, False, False),
        ([0.001, 50.0], True, False, False),
        ([], False, False, False),
    ],
)
def test_a_wide_range_of_positive_values_has_a_logarithmic_scale(
    values: list[float], *, from_zero: bool, is_log: bool, may_be: bool
) -> None:
    [data] = chart_data(report.line_chart("loss", {"loss": list(enumerate(values))}, "step", from_zero=from_zero))
    assert (data["log"], data["positive"]) == (is_log, may_be)


# ---- Other pieces


@pytest.mark.parametrize(
    ("number", "text"),
    [
        *((1_234_567, "1,234,567"), (0.254162, "0.2542"), (22_794.6, "22,795"), (1e-05, "1e-05"), (3.0, "3")),
        *((-1_500.5, "-1,500"), (1e15, "1e+15"), (math.nan, "nan"), (-math.inf, "-inf")),
    ],
)
def test_numbers_are_short(number: float, text: str) -> None:
    assert brief(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((0, "0 s"), (0.25, "0.25 s"), (9.96, "10 s"), (42.3, "42 s"), (60, "1 min"), (200, "3 min 20 s")),
        *((3_599.9, "60 min"), (7_500, "2 h 5 min"), (200_000, "2.3 days")),
    ],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert report.duration(seconds) == text


def test_a_timeline_says_what_happened_and_when() -> None:
    events = [report.Event(time=105, text="ranks have met"), report.Event(time=190, text="failed", detail="line\nline")]
    page = report.timeline(events, start=100)
    assert [row[0] for row in rows_of(page)[1:]] == ["+5 s", "+1 min 30 s"]
    assert "line\nline" in page
