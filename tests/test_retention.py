"""`Keep` keeps the right checkpoints, for any metrics."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from flytekitplugins.daskpytorch import Keep
from flytekitplugins.daskpytorch.driver.manifest import best_first, hint_of_metric, retained


@dataclass(frozen=True)
class Kept:
    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)


BY_LOSS = Keep(last=1, best=1, metric="loss")


def kept(*losses: float | None) -> list[Kept]:
    """One of each step from 0 on; None: without a metric."""
    return [Kept(step, {} if loss is None else {"loss": loss}) for step, loss in enumerate(losses)]


def steps(entries: list[Kept], keep: Keep) -> list[int]:
    return [entry.step for entry in retained(entries, keep)]


def test_the_last_two_stay_by_default() -> None:
    assert steps(kept(*range(5)), Keep()) == [3, 4]
    assert steps(kept(1.0), Keep()) == [0]
    assert steps([], Keep()) == []


@pytest.mark.parametrize(("mode", "best"), [("min", 1), ("max", 2)])
def test_the_best_stays_beside_the_last(mode: str, best: int) -> None:
    keep = Keep(last=1, best=1, metric="loss", mode=mode)  # type: ignore[arg-type]
    assert steps(kept(0.5, 0.1, 0.9, 0.4, 0.3), keep) == [best, 4]


def test_one_that_is_both_is_not_counted_twice_and_takes_no_place_of_another() -> None:
    assert steps(kept(0.5, 0.4, 0.3), Keep(last=2, best=2, metric="loss")) == [1, 2]


def test_the_newest_stays_however_bad() -> None:
    for loss in (9.0, math.nan, math.inf, None):
        assert steps(kept(0.1, 0.2, loss), BY_LOSS) == [0, 2]


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("missing", [math.nan, None])
def test_what_is_no_number_is_never_among_the_best(missing: float | None, mode: str) -> None:
    keep = Keep(last=1, best=2, metric="loss", mode=mode)  # type: ignore[arg-type]
    assert steps(kept(missing, 0.5, missing, missing), keep) == [1, 3]
    assert steps(kept(missing, missing), keep) == [1]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_of_equal_ones_the_earlier_stays(mode: str) -> None:
    keep = Keep(last=1, best=1, metric="loss", mode=mode)  # type: ignore[arg-type]
    assert steps(kept(0.5, 0.5, 0.5), keep) == [0, 2]


def test_a_step_that_was_saved_again_takes_one_place_among_the_best() -> None:
    entries = [Kept(1, {"loss": 0.1}), Kept(2, {"loss": 0.2}), Kept(1, {"loss": 0.3}), Kept(3, {"loss": 0.9})]
    assert retained(entries, Keep(last=1, best=2, metric="loss")) == entries[1:]
    unmeasured = [Kept(1, {"loss": 0.1}), Kept(1), Kept(2)]
    assert retained(unmeasured, BY_LOSS) == [unmeasured[0], unmeasured[2]]


def test_what_stays_of_each_new_one_is_what_stays_of_all() -> None:
    """So that what was removed is never missed."""
    random_numbers = random.Random(0)
    for keep in (BY_LOSS, Keep(last=3, best=2, metric="loss", mode="max")):
        entries = kept(*(random_numbers.choice([0.1, 0.2, 0.3, 0.4, math.nan, None]) for _ in range(200)))
        staying: list[Kept] = []
        for count, entry in enumerate(entries, 1):
            staying = retained([*staying, entry], keep)
            assert staying == retained(entries[:count], keep)


def test_the_best_come_first() -> None:
    entries = kept(0.3, None, 0.1, math.nan, 0.2)
    assert [entry.step for entry in best_first(entries, BY_LOSS)] == [2, 4, 0]
    assert best_first(entries, Keep()) == []


@pytest.mark.parametrize(
    ("keep", "metrics"),
    [(BY_LOSS, []), (BY_LOSS, [{}]), (BY_LOSS, [{"acc": 1.0}, {"loss": 1.0}]), (Keep(), [{"acc": 1.0}])],
)
def test_no_metric_is_missed_where_none_is_asked_for_or_one_has_it(
    keep: Keep, metrics: list[Mapping[str, float]]
) -> None:
    assert hint_of_metric([Kept(step, each) for step, each in enumerate(metrics)], keep) is None


def test_a_metric_that_no_checkpoint_has_is_missed_beside_those_that_they_have() -> None:
    hint = hint_of_metric([Kept(0), Kept(1, {"val_loss": 0.1}), Kept(2, {"acc": 1.0})], BY_LOSS)
    assert hint is not None
    assert "metric='loss'" in hint
    assert hint.endswith("acc, val_loss")
