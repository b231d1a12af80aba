"""What an Optuna study is asked and told, without any gang."""

from __future__ import annotations

import math
import pickle
import warnings
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from flytekitplugins.daskpytorch import Search, StoppedEarlyError
from flytekitplugins.daskpytorch.context import LogRecord
from flytekitplugins.daskpytorch.protocol.observer import Observer
from flytekitplugins.daskpytorch.sweep.search import Suggestions
from flytekitplugins.daskpytorch.sweep.storage import Kept

PRUNER = optuna.pruners.ThresholdPruner(upper=5.0)
STOPPED = StoppedEarlyError("experiment 0 was stopped early", epoch=2, metric="loss", value=6.0)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Of what Optuna and we warn of, only what a test expects."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        # Not of others: what an earlier test left open may be collected here.
        warnings.filterwarnings("error", module=r"optuna\.|flytekitplugins\.")
        yield
    optuna.logging.set_verbosity(verbosity)


def suggest(trial: optuna.Trial) -> dict[str, float]:
    return {"lr": trial.suggest_float("lr", 0.0, 1.0)}


def suggestions(study: optuna.Study | None = None, metric: str | None = "loss") -> Suggestions:
    study = study or optuna.create_study(pruner=PRUNER)
    return Suggestions(Search(study=study, suggest=suggest, num_models=10, metric=metric))


def log(reporter: Observer, step: int = 0, rank: int = 0, num_steps: int | None = None, **metrics: Any) -> bool:
    """Whether the model goes on after such a record."""
    try:
        reporter.logged(LogRecord(rank=rank, step=step, num_steps=num_steps, time=0.0, metrics=metrics))
    except StoppedEarlyError:
        return False
    return True


def kept(asked: Suggestions, index: int, **others: Any) -> Kept:
    """As it comes back from storage."""
    trial = asked.trial(index)
    return pickle.loads(pickle.dumps(Kept(experiment=dict(trial.params), trial=trial, **others)))  # type: ignore[no-any-return]


def test_a_model_is_a_trial_that_is_told_of_its_end() -> None:
    asked = suggestions()
    experiments = [asked.ask(index) for index in range(4)]
    trials = asked.search.study.trials
    assert [trial.params for trial in trials] == experiments
    assert [trial.user_attrs["model"] for trial in trials] == [0, 1, 2, 3]
    asked.tell(0, None, "a state", {"loss": 0.5, "accuracy": 1.0})
    asked.tell(1, STOPPED, None, {"loss": 6.0})
    asked.tell(2, LookupError("no good"), None, {"loss": 0.1})
    asked.tell(3, CancelledError(), None, {})
    asked.tell(3, None, None, {"loss": 0.0})  # the first end counts
    asked.tell(7, None, None, {"loss": 0.0})  # has not begun
    trials = asked.search.study.trials
    assert [trial.state.name for trial in trials] == ["COMPLETE", "PRUNED", "FAIL", "FAIL"]
    assert trials[0].value == 0.5


def test_without_a_metric_the_study_hears_of_what_is_returned() -> None:
    asked = suggestions(optuna.create_study(directions=["minimize", "maximize"]), metric=None)
    asked.ask(0)
    assert log(asked.reporter(0), epoch=1, loss=9.0)
    asked.tell(0, None, (1.0, 2.0), {"loss": 9.0})
    assert asked.search.study.trials[0].values == [1.0, 2.0]


def test_with_several_directions_nothing_is_pruned() -> None:
    asked = suggestions(optuna.create_study(directions=["minimize", "maximize"]))
    asked.ask(0)
    assert log(asked.reporter(0), epoch=1, loss=9.0)


@pytest.mark.parametrize("value", [None, math.nan, "low"])
def test_what_is_no_number_is_a_failure_that_is_warned_of(value: Any) -> None:
    asked = suggestions()
    asked.ask(0)
    with pytest.warns(UserWarning, match=r"could not be cast to float|not acceptable|did not match"):
        asked.tell(0, None, None, {"loss": value} if value is not None else {})
    assert asked.search.study.trials[0].state is TrialState.FAIL


def test_the_studys_pruner_stops_models() -> None:
    asked = suggestions()
    for index in range(3):
        asked.ask(index)
    first, second, third = map(asked.reporter, range(3))
    assert log(first, epoch=1, loss=1.0)
    assert log(first, epoch=1, loss=9.0)  # the first of an epoch counts
    assert log(first, loss=9.0)
    assert log(first, epoch=2, accuracy=9.0)
    assert log(first, rank=1, epoch=2, loss=9.0)
    assert log(first, epoch=1.5, loss=9.0)  # still epoch 1
    with pytest.raises(StoppedEarlyError, match=r"experiment 0 was .* after epoch 2: its loss was 6.*ThresholdPruner"):
        first.logged(LogRecord(rank=0, step=2, num_steps=None, time=0.0, metrics={"epoch": 2, "loss": 6.0}))
    assert log(first, epoch=3, loss=9.0)  # it may still say something
    assert log(second, step=9, num_steps=10, epoch=1, loss=9.0)  # it has done its last step
    assert not log(third, step=8, num_steps=10, epoch=1, loss=9.0)
    assert asked.search.study.trials[0].intermediate_values == {1: 1.0, 2: 6.0}


@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_another_process_goes_on_with_the_same_trials(store: str, tmp_path: Path) -> None:
    """One has ended, one was being told, one has begun, one has failed; a study in memory has lost all of them."""
    asked = suggestions(study_of(store, tmp_path))
    for index in range(4):
        asked.ask(index)
        log(asked.reporter(index), epoch=1, loss=float(index))
    asked.tell(0, None, None, {"loss": 0.5})
    records = [LogRecord(rank=0, step=1, num_steps=None, time=0.0, metrics={"loss": 0.25})]
    ended, untold = kept(asked, 0, has_ended=True), kept(asked, 1, has_ended=True, records=records)
    begun, failed = kept(asked, 2), kept(asked, 3)
    asked.tell(3, LookupError("no good"), None, {})

    again = suggestions(study_of(store, tmp_path))
    again.recall(ended)
    again.attach(2, begun)
    again.attach(3, failed)
    if store == "sqlite":
        again.recall(untold)
        assert again.trial(2).number == begun.trial.number
    assert again.trial(2).params == begun.experiment
    assert again.trial(3).params == failed.experiment
    reporter = again.reporter(2)
    assert log(reporter, epoch=1, loss=9.0)  # the study has that epoch already
    assert not log(reporter, epoch=2, loss=9.0)
    again.tell(2, STOPPED, None, {})
    again.tell(3, None, None, {"loss": 0.75})
    again.ask(4)
    found = [(trial.user_attrs["model"], trial.state.name) for trial in again.search.study.trials]
    lost = [(1, "COMPLETE")] if store == "sqlite" else []
    failure = [(3, "FAIL")] if store == "sqlite" else []
    assert sorted(found) == sorted([(0, "COMPLETE"), *lost, (2, "PRUNED"), *failure, (3, "COMPLETE"), (4, "RUNNING")])


def study_of(store: str, folder: Path) -> optuna.Study:
    url = f"sqlite:///{folder / 'study.db'}" if store == "sqlite" else None
    return optuna.create_study(study_name="search", storage=url, load_if_exists=True, pruner=PRUNER)
