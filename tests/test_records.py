"""Statistics of a training as files and as curves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.records import EVALUATION, TRAINING, Point, Record, as_files, curve, read_records


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


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    for path, text in as_files(RECORDS).items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    assert sorted(read_records(tmp_path), key=repr) == sorted(RECORDS, key=repr)
    assert [record.epoch for record in read_records(tmp_path) if record.phase == TRAINING] == [1, 1, 1, 2, 11]


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
