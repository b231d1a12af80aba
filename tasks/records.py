"""Statistics of a training by step and rank, as files and as curves. Runs in ranks and tasks."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

TRAINING, EVALUATION = "train", "eval"


@dataclass(frozen=True, kw_only=True)
class Record:
    """Statistics of one batch of one rank."""

    step: int
    """Number of the gang's training steps, including this one."""
    loss: float
    """Mean cross-entropy of this batch, in nats per image."""
    lr: float
    """Learning rate of the step."""
    correct: int
    """Number of images of this batch whose class the model ranked first."""
    epoch: int
    """Number of the epoch, from 1."""
    count: int
    """Number of images of this batch."""
    worker: int
    """Number of the rank."""
    sample: int
    """Number of images that this rank has seen in this phase, in all epochs."""
    phase: str
    """Phase of the training: `train` or `eval`."""


class Point(NamedTuple):
    """Loss and accuracy of all ranks together at a step."""

    step: int
    loss: float
    accuracy: float


def as_files(records: Iterable[Record]) -> dict[str, str]:
    """Return the records as JSON lists by file path. Each epoch, phase and rank has one file."""
    by_path: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_path[f"epoch-{record.epoch:03}/{record.phase}-rank-{record.worker}.json"].append(record)
    return {path: json.dumps([asdict(record) for record in some]) for path, some in by_path.items()}


def read_records(folder: str | os.PathLike[str]) -> list[Record]:
    """Return all records below the folder, in the order of epochs, phases and ranks."""
    return [
        Record(**row) for file in sorted(Path(folder).rglob("*-rank-*.json")) for row in json.loads(file.read_text())
    ]


def curve(records: Sequence[Record], phase: str) -> list[Point]:
    """Return loss and accuracy of all ranks together by step.

    All batches of an evaluation have the same step, so each evaluation is one point.
    """
    by_step: dict[int, list[Record]] = defaultdict(list)
    for record in records:
        if record.phase == phase and record.count:
            by_step[record.step].append(record)
    return [_point(step, by_step[step]) for step in sorted(by_step)]


def _point(step: int, records: Sequence[Record]) -> Point:
    count = sum(record.count for record in records)
    return Point(
        step=step,
        loss=sum(record.loss * record.count for record in records) / count,
        accuracy=sum(record.correct for record in records) / count,
    )
