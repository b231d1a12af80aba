"""`ModelFutures`: results, records, errors and table. Gangs start on free workers. No gang runs."""

import math
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from flytekitplugins.daskpytorch import StoppedEarlyError
from flytekitplugins.daskpytorch.dask.agents import Allotment
from flytekitplugins.daskpytorch.display.run_state import View
from flytekitplugins.daskpytorch.records import LogRecord
from flytekitplugins.daskpytorch.sweep.models import ModelFutures
from flytekitplugins.daskpytorch.sweep.sweep import Model, ModelFuture
from told import To


@dataclass(frozen=True)
class Shape:
    width: int
    step: int


class Pair(NamedTuple):
    lr: float
    depth: int


def model(index: int, experiment: Any, *records: dict[str, Any]) -> ModelFuture:
    made = Model(index=index, experiment=experiment, num_workers=1, line=View())
    for step, metrics in enumerate(records):
        To(made.state).logged(LogRecord(rank=0, step=step, num_steps=None, time=0.0, metrics=metrics))
    return ModelFuture(made, lambda: False)


def models_of(*futures: ModelFuture) -> ModelFutures:
    models = ModelFutures.__new__(ModelFutures)
    models._futures = list(futures)
    return models


STOPPED = StoppedEarlyError("experiment 2 of 6 was stopped early", epoch=1, metric="loss", value=0.1)
FAILED = LookupError("no good")


@pytest.fixture
def models() -> ModelFutures:
    """Six, each with an end of its own; the first two have finished."""
    futures = [
        model(0, {"lr": 0.5}, {"epoch": 1, "loss": 3.0}, {"epoch": 2, "loss": 2.0}, {"accuracy": 0.5}),
        model(1, {"lr": 0.1}, {"epoch": 1, "loss": 1.0}),
        model(2, {"lr": 0.01}, {"epoch": 1, "loss": 0.1}),
        model(3, {"lr": 0.2}, {"epoch": 1, "loss": 0.2}),
        model(4, {"lr": 0.3}, {"epoch": 1, "loss": 0.3}),
        model(5, {"lr": 0.4}),
    ]
    for future in futures[:5]:
        future.set_running_or_notify_cancel()
    for future in futures[:2]:
        future.set_result(f"model {future.index}")
    futures[2].set_exception(STOPPED)
    futures[3].set_exception(FAILED)
    return models_of(*futures)


def end(models: ModelFutures) -> None:
    """What has not ended is cancelled: one while it trains, one while it waits."""
    models[4].set_exception(CancelledError("cancelled"))
    super(ModelFuture, models[5]).cancel()
    models[5].set_running_or_notify_cancel()


def test_how_it_stands_with_each(models: ModelFutures) -> None:
    statuses = ["finished", "finished", "stopped early", "failed"]
    assert [future.status for future in models] == [*statuses, "training", "waiting"]
    assert repr(models) == ("<ModelFutures: 6 models: 1 training, 1 failed, 2 finished, 1 stopped early, 1 waiting>")
    end(models)
    assert [future.status for future in models] == [*statuses, "cancelled", "cancelled"]
    assert repr(models[3]) == "<ModelFuture 3: failed, {'lr': 0.2}>"
    assert repr(model(0, {"api_key": "k1"})) == "<ModelFuture 0: waiting, {'api_key': '(hidden)'}>"
    assert repr(models_of()) == "<ModelFutures: 0 models>"
    assert repr(models_of(model(0, 1))) == "<ModelFutures: 1 model: 1 waiting>"


def test_one_bad_model_does_not_withhold_the_others_results(models: ModelFutures) -> None:
    with pytest.raises(TimeoutError):
        models.result(0.01, return_exceptions=True)
    end(models)
    found = models.result(return_exceptions=True)
    assert found[:4] == ["model 0", "model 1", STOPPED, FAILED]
    assert all(isinstance(error, CancelledError) for error in found[4:])
    with pytest.raises(LookupError, match="no good"):
        models.result()


def test_a_result_that_is_an_exception_is_a_result() -> None:
    future = model(0, 1)
    future.set_result(FAILED)
    assert models_of(future).result() == models_of(future).result(return_exceptions=True) == [FAILED]


def test_the_best_is_a_finished_one_by_its_newest_value(models: ModelFutures) -> None:
    with pytest.raises(TimeoutError):
        models.best("loss", timeout=0.01)
    with pytest.raises(ValueError, match=r"best\(metric='score'\): must be given with mode='min' if .*mode='max' if"):
        models.best("score")  # at once, not after the models
    end(models)
    assert models.best("loss") is models[1]
    assert models.best("loss", "max") is models[0]
    assert models.best("accuracy") is models.best("accuracy", "max") is models[0]


def test_nothing_is_best(models: ModelFutures) -> None:
    end(models)
    with pytest.raises(ValueError, match=r"best\(metric='losss'\): no finished .*: accuracy, epoch, loss$"):
        models.best("losss", "min")
    with pytest.raises(ValueError, match=r"best\(mode='low'\): must be None or one of min, max"):
        models.best("loss", "low")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="There are 0 models; the finished ones have logged: nothing"):
        models_of().best("loss")


@pytest.mark.parametrize("mode", ["min", "max"])
def test_what_is_no_number_is_never_the_best(mode: Any) -> None:
    futures = [model(index, index, {"loss": value}) for index, value in enumerate((math.nan, "low", 5.0))]
    for future in futures:
        future.set_running_or_notify_cancel()
        future.set_result(None)
    assert models_of(*futures).best("loss", mode) is futures[2]


def test_after_a_restart_the_newest_values_are_those_of_the_records_that_stay() -> None:
    future = model(0, 1, {"loss": 3.0, "lr": 1.0}, {"loss": 2.0}, {"loss": 1.0, "late": 1.0})
    assert (future.metrics, future.step) == ({"loss": 1.0, "lr": 1.0, "late": 1.0}, 2)
    To(future._run_state).restarting("a rank was lost", 1)
    assert (future.metrics, future.step) == ({"loss": 2.0, "lr": 1.0}, 1)
    To(future._run_state).restarting("a rank was lost", None)
    assert (future.metrics, future.step) == ({}, None)


def test_a_frame_has_a_row_for_each_model(models: ModelFutures) -> None:
    frame = models.to_frame()
    assert list(frame.columns) == ["status", "step", "lr", "epoch", "loss", "accuracy"]
    assert frame.index.name == "model"
    assert list(frame.index) == list(range(6))
    assert frame.sort_values("loss").lr.to_list()[:2] == [0.01, 0.2]
    assert frame.loc[0, "step"] == 2
    assert frame.loc[5].isna().sum() == 4
    assert models_of().to_frame().empty


def test_columns_of_one_name_are_told_apart() -> None:
    shape = model(0, Shape(width=4, step=7), {"step": 70, "width": 40, "loss": 1.0})
    pair, number = model(1, Pair(0.1, 3)), model(2, 17)
    assert models_of(shape, pair, number).to_frame().columns.to_list() == [
        "status",
        "step",
        "width",
        "experiment.step",
        "metric.step",
        "metric.width",
        "loss",
        "lr",
        "depth",
        "experiment",
    ]


# ---- Gangs start on free workers


WORKERS = [f"tcp://10.0.0.{number}:1" for number in range(1, 5)]


def test_a_lost_worker_that_nothing_replaces_yet() -> None:
    allotment = Allotment(WORKERS[:2])
    allotment.acquire("a", 2)
    allotment.update(WORKERS[:1])
    assert allotment.refill("a") == WORKERS[:1]
    allotment.update([WORKERS[0], WORKERS[3]])
    assert allotment.num_free == 0
    assert allotment.refill("a") == [WORKERS[0], WORKERS[3]]
    allotment.release("a")
    assert allotment.free == {WORKERS[0], WORKERS[3]}
    assert not allotment.has_holders
