"""Decks in a real browser: everything is drawn, labelled, and within the page."""

import pytest

from browser import Inspected, inspect
from clock import Clock
from flytekitplugins.daskpytorch import report
from flytekitplugins.daskpytorch.display.deck import html
from flytekitplugins.daskpytorch.display.run_state import RunState
from flytekitplugins.daskpytorch.errors import GangError
from flytekitplugins.daskpytorch.records import Goodput
from test_deck import shape
from told import To, record, usage

WIDTHS = (1200, 400)
LONG = "a-long-name/without-any-place-to-break_it" * 5


def trained() -> RunState:
    """All that a page may have, with a restart in it."""
    recorder = RunState(name="flows.train", inputs={"lr": 0.1, LONG: LONG}, clock=(clock := Clock()))
    To(recorder).placed(shape(4, gpus=1))
    To(recorder).formed(1.0)
    for step in range(200):
        clock.now += 1
        To(recorder).logged(record(step, num_steps=400, time=clock.now, epoch=1 + step // 50, loss=100 / (1 + step)))
        if step % 50 == 49:
            To(recorder).logged(record(step, time=clock.now, epoch=1 + step // 50, held_out_loss=1.0 + 1 / (1 + step)))
            To(recorder).kept(step)
        for rank in range(4):
            To(recorder).used(usage(rank, clock.now, step, gpu_memory=1 << 35, gpu_utilization=0.5))
        if step == 120:
            To(recorder).restarting(f"rank 3 was killed {LONG}", 99)
            To(recorder).placed(shape(3))
            To(recorder).formed(1.0)
    bill = {"gpu_hours": 1234.5, "core_hours": 9876.0, "trained_hours": 987.6, "cost": 12345.678}
    seconds = {"starting": 10, "stepping": 50, "data": 10, "evaluation": 10, "saving": 5, "waiting": 5}
    To(recorder).accounted(Goodput(total=90, **seconds, **bill))
    return recorder


@pytest.fixture(scope="module")
def inspected(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Inspected]:
    failed = trained()
    To(failed).ended(GangError(f"rank 1 raised ValueError: {LONG}\n{LONG}", rank=1))
    points = [(0, 1.0), (1, 0.5), (2, 0.25)]
    curves = report.line_chart("first", {"a": points}, "step"), report.line_chart("second", {"b": points[:1]}, "step")
    pages = {
        "training": html(trained(), {"results": f"s3://{LONG}"}),
        "failed": html(failed),
        "empty": html(RunState(name="flows.train")) + report.line_chart("nothing", {"loss": []}, "step"),
        "two": report.page(report.line_chart("one", {"a": points}, "epoch")) + report.page(*curves),
        "mine": report.page(*curves),
    }
    return inspect(pages, tmp_path_factory.mktemp("browser"), WIDTHS)


def test_nothing_is_wider_than_the_window(inspected: dict[tuple[str, int], Inspected]) -> None:
    assert {page: found.overflow for page, found in inspected.items()} == dict.fromkeys(inspected, 0)


def test_every_chart_is_drawn(inspected: dict[tuple[str, int], Inspected]) -> None:
    drawn = {page: (found.num_drawn, found.num_charts) for page, found in inspected.items()}
    assert drawn["two", 1200] == (3, 3)
    assert drawn["mine", 400] == (2, 2)
    assert drawn["training", 1200] == drawn["failed", 400] == (6, 6)


def test_charts_have_titles_no_page_asks_anything_of_others_and_no_script_fails(
    inspected: dict[tuple[str, int], Inspected],
) -> None:
    for found in inspected.values():
        assert all(len(label) > 10 for label in found.labels)
        assert (found.requests, found.errors) == ([], [])
    assert inspected["training", 1200].labels[0] == "loss by step"


def test_arrow_keys_read_values_and_buttons_can_be_pressed(inspected: dict[tuple[str, int], Inspected]) -> None:
    found = inspected["mine", 1200]
    assert found.legend == ["0.25", "1"]
    assert found.legend_after_arrow == ["1 at 0", "1"]
    assert found.pressed == ["true", "false", "true", "false"]  # the logarithmic scale is on, the line is off
