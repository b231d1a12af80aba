"""Sweeps over hyper-parameters of the name model: the grid, the experiments' outcomes, and their tables.

`train` runs in the ranks. All other functions run in the driver, without Flyte or Dask.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import accumulate, product
from typing import Any

import torch

from flytekitplugins.daskpytorch import PreemptedError
from tasks import char_lstm
from tasks.char_lstm import EpochMetrics, Hyperparameters, TrainingResult
from tasks.checks import is_between, is_whole

MAX_ERROR_LENGTH = 300
"""Maximum number of characters of an error in a line."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Settings of one model of a sweep."""

    batch_size: int
    """Windows per step and rank."""
    lr: float
    """Adam's learning rate."""
    ranks: int = 1
    """Number of ranks that train the model, each on its own worker."""

    @property
    def global_batch(self) -> int:
        """Windows per step of all ranks together."""
        return self.ranks * self.batch_size

    @property
    def shape(self) -> dict[str, Any]:
        """Columns of a `ScalingRow` and a `TimeToLoss` that identify the experiment."""
        return {"ranks": self.ranks, "batch_size": self.batch_size, "global_batch": self.global_batch, "lr": self.lr}

    @property
    def label(self) -> str:
        """Text for people, such as `batch size 4,096, learning rate 0.001`. A single rank is not mentioned."""
        ranks = f"{self.ranks} ranks x " if self.ranks > 1 else ""
        return f"{ranks}batch size {self.batch_size:,}, learning rate {self.lr:g}"

    def hyperparameters(self, common: Hyperparameters) -> Hyperparameters:
        """Return the common hyper-parameters with this experiment's batch size and learning rate."""
        return replace(common, batch_size=self.batch_size, learning_rate=self.lr)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of an experiment: a trained model or an error."""

    experiment: Experiment
    result: TrainingResult | None = None
    error: Exception | None = None

    @property
    def trained(self) -> TrainingResult:
        """Trained model.

        Raises:
            ValueError: The experiment failed.
        """
        if self.result is None:
            raise ValueError(f"{self.experiment.label} failed and has no model: {self.failure}") from self.error
        return self.result

    @property
    def epochs(self) -> list[EpochMetrics]:
        """Metrics of the epochs. Empty if the experiment failed."""
        return self.result.epochs if self.result else []

    @property
    def losses(self) -> list[float]:
        """Held-out loss after each epoch, in nats per character."""
        return [epoch.held_out_loss for epoch in self.epochs]

    @property
    def standing(self) -> float:
        """Final held-out loss, by which experiments are ranked. NaN counts as infinity."""
        return math.inf if math.isnan(self.losses[-1]) else self.losses[-1]

    @property
    def elapsed(self) -> list[float]:
        """Seconds of training from its start to the end of each epoch, as in `SweepRow.elapsed_time_sec`."""
        return list(accumulate(epoch.epoch_seconds for epoch in self.epochs))

    @property
    def failure(self) -> str:
        """Type and first line of the error. Empty without an error."""
        if self.error is None:
            return ""
        first, *_ = str(self.error).splitlines() or [""]
        return f"{type(self.error).__name__}: {first}"[:MAX_ERROR_LENGTH]


@dataclass
class SweepRow:
    """Metrics of one epoch of one experiment."""

    batch_size: int
    """Windows per step."""
    lr: float
    """Adam's learning rate."""
    epoch: int
    """Number of the epoch, from 1."""
    loss: float
    """Cross-entropy of the next character on held-out names at the end of the epoch, in nats per character."""
    elapsed_time_sec: float
    """Seconds from the start of the training to the end of the epoch, on rank 0's clock. Evaluations and time lost in
    interruptions do not count."""


@dataclass
class ScalingRow:
    """Metrics of one epoch of one experiment with any number of ranks. Units are those of `SweepRow`."""

    ranks: int
    """Number of ranks that trained together, each on its own worker."""
    batch_size: int
    """Windows per step and rank."""
    global_batch: int
    """Windows per step of all ranks together."""
    lr: float
    epoch: int
    loss: float
    elapsed_time_sec: float


@dataclass
class TimeToLoss:
    """Time of an experiment to the target loss."""

    ranks: int
    batch_size: int
    """Windows per step and rank."""
    global_batch: int
    lr: float
    seconds: float | None
    """Seconds of training to the end of the first epoch with the target's held-out loss or a lower one. None: never."""


# ---- Before the training


def grid(batch_sizes: Sequence[int], learning_rates: Sequence[float], ranks: Sequence[int] = (1,)) -> list[Experiment]:
    """Return all combinations of ranks, batch sizes and learning rates, in this order of nesting.

    Args:
        batch_sizes: Windows per step and rank.
        learning_rates: Adam's learning rates.
        ranks: Numbers of ranks that train a model together.

    Raises:
        ValueError: A list is empty, repeats a value or has an invalid one. The message names every wrong list.
    """
    checks = {
        "batch_sizes": (batch_sizes, lambda value: is_whole(value, 1), "whole numbers from 1 up"),
        "learning_rates": (learning_rates, lambda value: is_between(value, 0, math.inf), "finite numbers above 0"),
        "ranks": (ranks, lambda value: is_whole(value, 1), "whole numbers from 1 up"),
    }
    problems = [
        f"{name}={list(values)}: must be one or more different {allowed}"
        for name, (values, is_allowed, allowed) in checks.items()
        if not values or len(set(values)) < len(values) or not all(map(is_allowed, values))
    ]
    if problems:
        raise ValueError("; ".join(problems))
    return [Experiment(ranks=n, batch_size=size, lr=lr) for n, size, lr in product(ranks, batch_sizes, learning_rates)]


def check_target(target_loss: float | None) -> None:
    """Check that the target loss can be reached.

    Raises:
        ValueError: The target is neither None nor a finite number above 0.
    """
    if target_loss is not None and not is_between(target_loss, 0, math.inf):
        raise ValueError(
            f"target_loss={target_loss}: must be a finite number of nats per character above 0; leave it out for the "
            "loss of a bigram model"
        )


# ---- In the ranks


def train(
    experiment: Experiment, *, training: list[str], held_out: list[str], hp: Hyperparameters, num_threads: int
) -> TrainingResult:
    """Train one model of a sweep. Every rank of its gang calls this function.

    Args:
        experiment: Settings of this model.
        training: Names to train on.
        held_out: Names for the evaluation.
        hp: Common hyper-parameters of all models.
        num_threads: Number of cores for each rank. Ranks do not know of other models that train on the same machine.
    """
    torch.set_num_threads(num_threads)
    return char_lstm.train(char_lstm.windows(training), char_lstm.windows(held_out), experiment.hyperparameters(hp))


# ---- After the training


def collect(experiments: Sequence[Experiment], models: Sequence[Future[TrainingResult]]) -> list[Outcome]:
    """Wait for all models, and return their outcomes. Print the failures.

    Raises:
        PreemptedError: The task is being preempted. The next attempt resumes all experiments.
        Exception: All experiments have failed. The error is that of the first experiment.
    """
    outcomes = [_outcome(experiment, model) for experiment, model in zip(experiments, models, strict=True)]
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    for outcome in failed:
        print(f"failed: {outcome.experiment.label}: {outcome.failure}")
    errors = [outcome.error for outcome in failed if outcome.error is not None]
    if preempted := next((error for error in errors if isinstance(error, PreemptedError)), None):
        raise preempted
    if len(errors) == len(outcomes):
        raise errors[0]
    return outcomes


def best(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the outcome with the lowest final held-out loss, and the first of several equal ones."""
    return min((outcome for outcome in outcomes if outcome.result), key=lambda outcome: outcome.standing)


def sweep_rows(outcomes: Sequence[Outcome]) -> list[SweepRow]:
    """Return a row for each epoch of each successful experiment, in the order of the grid."""
    return [
        SweepRow(batch_size=one.batch_size, lr=one.lr, epoch=epoch.epoch, loss=epoch.held_out_loss, elapsed_time_sec=s)
        for one, epoch, s in _epochs(outcomes)
    ]


def scaling_rows(outcomes: Sequence[Outcome]) -> list[ScalingRow]:
    """Return a row for each epoch of each successful experiment, in the order of the grid."""
    return [
        ScalingRow(**one.shape, epoch=epoch.epoch, loss=epoch.held_out_loss, elapsed_time_sec=seconds)
        for one, epoch, seconds in _epochs(outcomes)
    ]


def time_to_loss(outcomes: Sequence[Outcome], target: float) -> list[TimeToLoss]:
    """Return when each experiment first ended an epoch with the target loss (nats per character) or a lower one.

    Times are ends of epochs. No value is interpolated.
    """
    return [
        TimeToLoss(
            **outcome.experiment.shape,
            seconds=next((s for loss, s in zip(outcome.losses, outcome.elapsed, strict=True) if loss <= target), None),
        )
        for outcome in outcomes
    ]


def without_partner(times: Sequence[TimeToLoss]) -> list[TimeToLoss]:
    """Return the times of experiments whose global batch and learning rate no other experiment has."""
    counts = Counter((time.global_batch, time.lr) for time in times)
    return [time for time in times if counts[time.global_batch, time.lr] == 1]


def _outcome(experiment: Experiment, model: Future[TrainingResult]) -> Outcome:
    try:
        return Outcome(experiment=experiment, result=model.result())
    except Exception as error:  # any error of a training, which is printed; the other models are kept
        return Outcome(experiment=experiment, error=error)


def _epochs(outcomes: Sequence[Outcome]) -> list[tuple[Experiment, EpochMetrics, float]]:
    """Return each epoch of each experiment, with the seconds of training to its end."""
    return [
        (outcome.experiment, epoch, seconds)
        for outcome in outcomes
        for epoch, seconds in zip(outcome.epochs, outcome.elapsed, strict=True)
    ]
