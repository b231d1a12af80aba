"""`Keep` keeps the right checkpoints, for any metrics."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest

from flytekitplugins.daskpytorch import Keep
from flytekitplugins.daskpytorch.driver.manifest import lack_of_metric, retained


@dataclass(frozen=True)
class Kept:
    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)


INF, NAN = float("inf"), float("nan")
BY_LOSS = Keep(last=1, best=1, metric="loss")


def kept(*losses: float | None) -> list[Kept]:
    """One of each step from 0 on; None: without a metric."""
    return [Kept(step, {} if loss is None else {"loss": loss}) for step, loss in enumerate(losses)]


BY_ACCURACY = Keep(last=1, best=1, metric="loss", mode="max")
BY_NAME = {
    name: Keep(last=1, best=1, metric=name) for name in ("val_loss", "val_accuracy", "top1-acc", "val/auc", "F1Score")
}
TWO_BEST = [Keep(last=1, best=2, metric="loss", mode=mode) for mode in ("min", "max")]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("keep", "losses", "staying"),
    [
        pytest.param(Keep(), [0, 1, 2, 3, 4], [3, 4], id="the last two by default"),
        pytest.param(Keep(), [1.0], [0], id="the only one"),
        pytest.param(Keep(), [], [], id="none"),
        pytest.param(BY_LOSS, [0.5, 0.1, 0.9, 0.4, 0.3], [1, 4], id="the lowest beside the last"),
        pytest.param(BY_ACCURACY, [0.5, 0.1, 0.9, 0.4, 0.3], [2, 4], id="the highest beside the last"),
        pytest.param(Keep(last=2, best=2, metric="loss"), [0.5, 0.4, 0.3], [1, 2], id="one that is both"),
        *(pytest.param(BY_LOSS, [0.1, 0.2, loss], [0, 2], id=f"the newest: {loss}") for loss in (9.0, NAN, INF, None)),
        *((keep, [missing, 0.5, missing, missing], [1, 3]) for keep in TWO_BEST for missing in (NAN, None)),
        *((keep, [missing, missing], [1]) for keep in TWO_BEST for missing in (NAN, None)),
        *(pytest.param(keep, [0.5, 0.5, 0.5], [0, 2], id="the earlier equal") for keep in (BY_LOSS, BY_ACCURACY)),
    ],
)
def test_the_last_and_the_best_stay(keep: Keep, losses: list[float | None], staying: list[int]) -> None:
    assert [entry.step for entry in retained(kept(*losses), keep)] == staying


@pytest.mark.parametrize(("name", "best"), [(name, 0 if name == "val_loss" else 2) for name in BY_NAME])
def test_the_best_by_a_metric_is_what_its_name_calls_good(name: str, best: int) -> None:
    entries = [Kept(step, {name: value}) for step, value in enumerate((0.1, 0.5, 0.9, 0.3))]
    assert [entry.step for entry in retained(entries, BY_NAME[name])] == [best, 3]
    turned = replace(BY_NAME[name], mode="max" if name == "val_loss" else "min")
    assert [entry.step for entry in retained(entries, turned)] == [2 - best, 3]


def test_a_step_that_was_saved_again_takes_one_place_among_the_best() -> None:
    entries = [Kept(1, {"loss": 0.1}), Kept(2, {"loss": 0.2}), Kept(1, {"loss": 0.3}), Kept(3, {"loss": 0.9})]
    assert retained(entries, Keep(last=1, best=2, metric="loss")) == entries[1:]
    unmeasured = [Kept(1, {"loss": 0.1}), Kept(1), Kept(2)]
    assert retained(unmeasured, BY_LOSS) == [unmeasured[0], unmeasured[2]]


def test_what_stays_of_each_new_one_is_what_stays_of_all() -> None:
    """So that what was removed is never missed."""
    random_numbers = random.Random(0)
    for keep in (BY_LOSS, Keep(last=3, best=2, metric="loss", mode="max")):
        entries = kept(*(random_numbers.choice([0.1, 0.2, 0.3, 0.4, NAN, None]) for _ in range(200)))
        staying: list[Kept] = []
        for count, entry in enumerate(entries, 1):
            staying = retained([*staying, entry], keep)
            assert staying == retained(entries[:count], keep)


@pytest.mark.parametrize(
    ("keep", "metrics"),
    [(BY_LOSS, []), (BY_LOSS, [{}]), (BY_LOSS, [{"acc": 1.0}, {"loss": 1.0}]), (Keep(), [{"acc": 1.0}])],
)
def test_no_metric_is_missed_where_none_is_asked_for_or_one_has_it(
    keep: Keep, metrics: list[Mapping[str, float]]
) -> None:
    assert lack_of_metric([Kept(step, each) for step, each in enumerate(metrics)], keep) is None
