"""Hints come for likely mistakes, and only for these."""

import math

import pytest

from flytekitplugins.daskpytorch.rank.usage import of_exchange, of_loss
from flytekitplugins.daskpytorch.records import LogRecord


def record(**metrics: object) -> LogRecord:
    return LogRecord(rank=0, step=7, num_steps=None, time=0.0, metrics=metrics)


@pytest.mark.parametrize(("name", "value"), [("loss", math.nan), ("val_loss", math.inf), ("Loss/train", -math.inf)])
def test_loss_that_is_no_number_is_told(name: str, value: float) -> None:
    hint = of_loss(record(**{"accuracy": 0.5, name: value}))
    assert hint is not None
    assert f"{name}={value} at step 7" in hint.text


@pytest.mark.parametrize("metrics", [{}, {"loss": 1e30}, {"accuracy": math.nan}, {"loss": "nan"}, {"loss": 3}])
def test_other_values_and_other_metrics_are_not(metrics: dict[str, object]) -> None:
    assert of_loss(record(**metrics)) is None


@pytest.mark.parametrize(
    ("num_collectives", "world_size", "is_told"), [(0, 2, True), (1, 2, False), (0, 1, False), (None, 2, False)]
)
def test_ranks_that_have_called_no_collective_are_told(
    num_collectives: int | None, world_size: int, *, is_told: bool
) -> None:
    assert (of_exchange(num_collectives, world_size, has_trained=True) is not None) is is_told
    assert of_exchange(num_collectives, world_size, has_trained=False) is None
