"""The workflows' Decks, charts, pictures and files, made from numbers without a training."""

import json
from typing import Any

import pytest

from flytekitplugins.daskpytorch.report.pieces import shared
from html_pages import Parts, chart_data, rows_of
from tasks.records import EVALUATION, TRAINING, Point, Record, as_files, curve
from tasks.registry import Promotion
from test_challenger import CARD
from workflows import retrain


def test_a_retraining_is_beside_its_champion() -> None:
    history = [
        Promotion(number=number, version=f"v{number}", previous=None, reason="better", at="2026-01-31")
        for number in (1, 2)
    ]
    curves = {"challenger": [(1.0, 2.0), (2.0, 1.5)], "champion": [(1.0, 1.75), (2.0, 1.75)]}
    page = retrain._page("v2 was promoted", "v2", CARD, history, curves, CARD.comparison)
    assert page.count(shared()) == 1
    Parts(page := page.replace(shared(), ""))
    [chart] = chart_data(page)
    assert [line["name"] for line in chart["lines"] if line["dashed"]] == ["champion"]
    rows = rows_of(page)
    assert rows.index(["2", "v2", "", "2026-01-31", "better"]) < rows.index(["1", "v1", "", "2026-01-31", "better"])
    assert "Model card of v2" in page


# ---- Statistics of a training, as files and as curves


def record(**changes: Any) -> Record:
    usual = {"step": 1, "loss": 2.0, "lr": 0.1, "correct": 1, "epoch": 1, "count": 4, "worker": 0, "sample": 4}
    return Record(**{**usual, "phase": TRAINING, **changes})


RECORDS = [
    record(),
    record(worker=1, loss=1.0, correct=1, count=1, sample=1),
    record(step=2, correct=4, sample=8),
    record(step=2, phase=EVALUATION, loss=3.0),
    record(step=2, phase=EVALUATION, loss=1.0, correct=3, sample=8),
    record(step=3, epoch=2, count=0),  # of a rank that had no image
    record(step=4, epoch=11),
]


def test_files_are_json_by_epoch_phase_and_rank() -> None:
    files = as_files(RECORDS)
    assert list(files)[:3] == [
        "epoch-001/train-rank-0.json",
        "epoch-001/train-rank-1.json",
        "epoch-001/eval-rank-0.json",
    ]
    assert [row["step"] for row in json.loads(files["epoch-001/train-rank-0.json"])] == [1, 2]
    assert set(json.loads(files["epoch-011/train-rank-0.json"])[0]) == {
        *("loss", "lr", "correct", "epoch", "count", "worker", "sample", "phase", "step")
    }


def test_a_curve_is_of_all_ranks_together() -> None:
    assert curve(RECORDS, TRAINING) == [
        Point(step=1, loss=pytest.approx(9 / 5), accuracy=pytest.approx(2 / 5)),
        Point(step=2, loss=2.0, accuracy=1.0),
        Point(step=4, loss=2.0, accuracy=0.25),
    ]
    assert curve(RECORDS, EVALUATION) == [Point(step=2, loss=2.0, accuracy=0.5)]
    assert curve([], TRAINING) == []
