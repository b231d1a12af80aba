"""Statistics of a training, step by step and rank by rank: as files, and as curves. Runs in ranks and tasks."""

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
    """One batch of one rank."""

    step: int
    """Training steps of the gang up to then, this one included."""
    loss: float
    """Mean cross-entropy in nats per image of this batch."""
    lr: float
    """The learning rate."""
    correct: int
    """Images of this batch whose class the model ranked first."""
    epoch: int
    """1 … epochs."""
    count: int
    """Images of this batch."""
    worker: int
    """The rank."""
    sample: int
    """Images that this rank had seen up to then in this phase, in all epochs."""
    phase: str
    """`train` or `eval`."""


class Point(NamedTuple):
    """What all ranks together found at a step."""

    step: int
    loss: float
    accuracy: float


def as_files(records: Iterable[Record]) -> dict[str, str]:
    """The records as JSON lists, by the path of the file that they belong into: one per epoch, phase and rank."""
    by_path: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_path[f"epoch-{record.epoch:03}/{record.phase}-rank-{record.worker}.json"].append(record)
    return {path: json.dumps([asdict(record) for record in some]) for path, some in by_path.items()}


def read_records(folder: str | os.PathLike[str]) -> list[Record]:
    """All records below the folder, in the order of epochs, phases and ranks."""
    return [
        Record(**row) for file in sorted(Path(folder).rglob("*-rank-*.json")) for row in json.loads(file.read_text())
    ]


def curve(records: Sequence[Record], phase: str) -> list[Point]:
    """Loss and accuracy of all ranks together against the steps.

    Batches of an evaluation share the step at which it was made, so that each evaluation is one point.
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
