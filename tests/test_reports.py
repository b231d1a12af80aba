"""Metrics of the user's classes reach the driver as plain numbers and texts."""

from __future__ import annotations

import pickle
from enum import IntEnum

import pytest

from flytekitplugins.daskpytorch.records import LogRecord


class Money(float):
    """A number of a class of the user's."""


class Level(IntEnum):
    HIGH = 3


class Colour(str):
    """A text that shows itself as another one."""

    __slots__ = ()

    def __str__(self) -> str:
        return self.upper()


@pytest.mark.parametrize(
    ("given", "plain"),
    [(1, 1), (0.5, 0.5), ("a", "a"), (True, True), (Money(2.5), 2.5), (Level.HIGH, 3), (Colour("red"), "red")],
)
def test_numbers_and_texts_of_the_users_classes_travel_as_plain_ones(given: float | str, plain: float | str) -> None:
    record = LogRecord(rank=0, step=1, num_steps=None, time=0.0, metrics={"given": given, "other": object()})
    [bare] = record.bare().metrics.values()
    assert bare == plain
    assert type(bare) is type(plain)
    assert pickle.loads(pickle.dumps(bare)) == plain
