"""Each hyper-parameter class reports all of its invalid values in one error."""

import math
from typing import Any

import pytest
import torch

from tasks import char_lstm, cnn, transfer
from tasks.drift import Limits
from tasks.together import check_seen_once

COMMON = {"epochs": 0, "seed": -1, "log_interval": 0}
WRONG: dict[type, dict[str, Any]] = {
    cnn.Hyperparameters: COMMON | {"backend": "mpi", "batch_size": 0, "test_batch_size": 0, "sgd_momentum": 1},
    char_lstm.Hyperparameters: COMMON | {"batch_size": 0, "learning_rate": math.inf, "dropout": 1.0, "held_out": 0.0},
    transfer.Hyperparameters: COMMON
    | {"base_lr": math.inf, "momentum": False, "batch_size": -1, "frozen_epochs": -1, "patience": -1, "resize": -1}
    | {"crop": -1, "held_out": 1, "num_loader_workers": -2, "checkpoint_interval": -1, "precision": "int8"}
    | {"on_error": "ignore"},
    Limits: {"min_names": 0, "min_growth": -1, "max_dropped": 2, "max_repeated": 2, "max_drift": 2},
}


@pytest.mark.parametrize("kind", WRONG, ids=lambda kind: kind.__module__)
def test_one_error_names_every_wrong_value_and_what_is_allowed(kind: type) -> None:
    with pytest.raises(ValueError, match="must be") as error:
        kind(**WRONG[kind])
    problems = str(error.value).split("; ")
    named = {f"{kind.__name__}({name}={value!r})" for name, value in WRONG[kind].items()}
    assert {problem.partition(": must be ")[0] for problem in problems} == named
    assert all(problem.partition(": must be ")[2] for problem in problems)


def test_samples_that_were_not_seen_once_are_an_error() -> None:
    check_seen_once(torch.ones(4), "test images")
    with pytest.raises(RuntimeError, match="1 of 4 test images not at all and 2 more than once"):
        check_seen_once(torch.tensor([0, 2, 1, 3]), "test images")
