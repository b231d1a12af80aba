"""Early stopping stops the worst models at each rung."""

import math
import pickle
from typing import Any

import pytest

from flytekitplugins.daskpytorch import EarlyStopping, StoppedEarlyError
from flytekitplugins.daskpytorch.protocol.observer import Observer
from flytekitplugins.daskpytorch.records import LogRecord
from flytekitplugins.daskpytorch.sweep.early_stopping import Judge, Rungs
from told import To, record

LOSS = EarlyStopping(metric="loss", reduction_factor=2)


class Models:
    """Judges of some models, and what was said."""

    def __init__(self, settings: EarlyStopping = LOSS, num_models: int = 4) -> None:
        self.said: list[str] = []
        rungs = Rungs(settings, num_models)
        self.judges = [Judge(rungs, index, self.said.append) for index in range(num_models)]

    def log(self, model: int, **metrics: Any) -> bool:
        """Whether the model goes on after such a record."""
        return error_of(self.judges[model], record(**metrics)) is None


def error_of(judge: Observer, logged: LogRecord) -> StoppedEarlyError | None:
    try:
        To(judge).logged(logged)
    except StoppedEarlyError as error:
        return error
    return None


Orders = dict[int, list[int]]


def epochs_trained(models: Models, values: list[float], num_epochs: int, orders: Orders | None = None) -> list[int]:
    """How far each model comes, if each logs the same value after every epoch, in the order given for that epoch."""
    trained = [num_epochs] * len(values)
    for epoch in range(1, num_epochs + 1):
        for model in (orders or {}).get(epoch, range(len(values))):
            if trained[model] == num_epochs and not models.log(model, epoch=epoch, loss=values[model]):
                trained[model] = epoch
    return trained


# ---- Who is stopped


HALVED: Orders = {1: [2, 3, 1, 0], 2: [1, 2, 0], 4: [0, 1]}
"""With a factor of 2 the worst of four stops after 1 epoch, the next after 2, the next after 4."""


@pytest.mark.parametrize(("mode", "sign"), [("min", 1.0), ("max", -1.0)])
def test_the_worse_ones_stop_at_the_rungs(mode: Any, sign: float) -> None:
    models = Models(EarlyStopping(metric="loss", mode=mode, reduction_factor=2))
    assert epochs_trained(models, [sign * value for value in (1.0, 2.0, 3.0, 4.0)], 10, HALVED) == [10, 4, 2, 1]


def test_the_least_accurate_stop_first_without_a_mode() -> None:
    models = Models(EarlyStopping(metric="val_accuracy", reduction_factor=2))
    assert all(models.log(index, epoch=1, val_accuracy=value) for index, value in enumerate((0.1, 0.5)))
    assert not models.log(2, epoch=1, val_accuracy=0.2)


def test_the_first_at_a_rung_goes_on_however_bad_and_so_do_those_that_are_better() -> None:
    assert epochs_trained(Models(), [4.0, 3.0, 2.0, 1.0], 10) == [10] * 4


def test_rungs_are_grace_period_times_powers_of_the_factor() -> None:
    models = Models(EarlyStopping(metric="loss", grace_period=2, reduction_factor=3), num_models=6)
    orders = {6: [3, 0, 5], 18: [5, 3]}
    assert epochs_trained(models, [1.0, 2.0, 3.0, 0.5, 1.5, 0.4], 40, orders) == [6, 2, 2, 18, 2, 40]


def test_a_model_that_logs_some_epochs_only_is_judged_at_all_rungs_that_it_has_passed() -> None:
    models = Models()
    assert models.log(0, epoch=4, loss=1.0)
    assert not models.log(1, epoch=5, loss=2.0)
    assert models.log(2, epoch=8, loss=0.5)


@pytest.mark.parametrize("mode", ["min", "max"])
def test_no_number_is_worst(mode: Any) -> None:
    models = Models(EarlyStopping(metric="loss", mode=mode, reduction_factor=2))
    error = error_of(models.judges[0], record(epoch=1, loss=math.nan))
    assert error is not None
    assert math.isnan(error.value)
    assert "its loss was nan, which is not a number" in str(error)
    assert models.log(1, epoch=1, loss=1.0)


def test_no_number_between_rungs_harms_nobody() -> None:
    models = Models()
    assert models.log(0, epoch=2, loss=1.0)
    assert models.log(0, epoch=3, loss=math.nan)
    assert models.log(0, epoch=4, loss=1.0)


@pytest.mark.parametrize("value", [math.inf, -math.inf, True, 1e308])
@pytest.mark.parametrize("epoch", [1, 10**300, 1e308, True])
def test_odd_values_and_epochs_are_compared_or_passed_over(epoch: Any, value: Any) -> None:
    models = Models()
    models.log(0, epoch=epoch, loss=value)
    models.log(1, epoch=epoch, loss=0.0)
    for judge in models.judges:
        To(judge).ended(None)
    assert len(models.said) <= 1  # where no epoch was one


def test_other_ranks_do_not_count() -> None:
    models = Models()
    models.log(0, epoch=1, loss=1.0)
    assert models.log(1, rank=1, epoch=1, loss=9.0)
    assert not models.log(1, rank=0, epoch=1, loss=9.0)


def test_an_epoch_that_comes_again_after_a_restart_is_not_judged_again() -> None:
    models = Models()
    assert models.log(0, epoch=1, loss=5.0)
    assert models.log(0, epoch=2, loss=5.0)
    assert models.log(1, epoch=1, loss=1.0)
    for epoch in (1, 2):
        assert models.log(0, epoch=epoch, loss=9.0)
    assert models.log(1, epoch=2, loss=4.0)  # better than 5, though not than 9
    assert models.log(0, epoch=3, loss=9.0)
    assert models.log(0, epoch=4, loss=9.0)  # the first there


@pytest.mark.parametrize("epoch", [math.nan, math.inf, -1, 0.5, "one", None])
def test_what_is_no_epoch_is_passed_over(epoch: Any) -> None:
    models = Models()
    models.log(0, epoch=1, loss=1.0)
    assert models.log(1, epoch=epoch, loss=2.0)


def test_the_error_says_who_when_at_what_and_why_and_survives_a_journey() -> None:
    models = Models(EarlyStopping(metric="loss"))
    models.log(0, epoch=1, loss=0.25)
    error = error_of(models.judges[2], record(epoch=1, loss=0.5))
    assert str(error) == (
        "experiment 2 of 4 was stopped early, after epoch 1: its loss was 0.5, "
        "which is not among the best 1/4 (min) of what models had there"
    )
    back = pickle.loads(pickle.dumps(error))
    assert (back.epoch, back.metric, back.value, str(back)) == (1, "loss", 0.5, str(error))


# ---- What is said


def test_a_metric_that_does_not_come_is_said_once_when_a_model_has_finished() -> None:
    models = Models(EarlyStopping(metric="accuracy"))
    for model in range(3):
        models.log(model, accuracy=1.0)
        models.log(model, epoch=1, loss=1.0)
    To(models.judges[0]).ended(ValueError("it failed"))
    assert models.said == []
    for judge in models.judges:
        To(judge).ended(None)
    [said] = models.said
    assert said.startswith("early stopping: no record so far had both 'epoch' and 'accuracy'")
    assert "Log both in one record" in said
