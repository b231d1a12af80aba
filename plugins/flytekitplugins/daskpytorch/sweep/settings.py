"""Settings of `dispatch.map` that stop models early or suggest experiments, with their checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from flytekitplugins.daskpytorch import checks
from flytekitplugins.daskpytorch.extras import require_extra
from flytekitplugins.daskpytorch.settings import NAME

if TYPE_CHECKING:
    import optuna

__all__ = ["EarlyStopping", "Search"]


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """Rule by which `dispatch.map` stops models early: asynchronous successive halving (Li et al. 2018).

    A model is compared at its rungs: the epochs `grace_period`, `grace_period * reduction_factor`, `grace_period *
    reduction_factor**2`, and so on. At a rung, the best `1 / reduction_factor` of the models that have reached the rung
    go on. With fewer than twice `reduction_factor` models there, only the best one goes on. Models do not wait for each
    other, so the first model at a rung always goes on.

    Raises:
        ImportError: The extra `sweep` is not installed.
        ValueError: A field's value is invalid.

    Examples:
        >>> from flytekitplugins.daskpytorch import EarlyStopping, current_rank, dispatch
        >>> def train(rate: float) -> float:
        ...     for epoch in range(1, 10):
        ...         current_rank().log({"epoch": epoch, "loss": rate / epoch})
        ...     return rate
        >>> models = dispatch.map(client, train, [0.1, 0.2, 0.4], stop_early=EarlyStopping(metric="loss"))
        >>> models.best("loss").experiment
        0.1
    """

    metric: str
    """Name of the metric that is compared at the rungs. Rank 0 must log the metric together with `epoch`, which should
    count from 1. The first record of an epoch counts, so log the metric at the epoch's end. A model whose metric is NaN
    at a rung is stopped."""
    mode: Literal["min", "max"] | None = None
    """Direction of the metric: `min` if low values are best, `max` if high values are best. None: by the words of the
    metric's name, as in `Keep`."""
    reduction_factor: int = 4
    """Divisor, from 2 up, of the number of compared models: one in `reduction_factor` models goes on."""
    grace_period: int = 1
    """Number of epochs, from 1 up, that every model trains before its first comparison."""

    def __post_init__(self) -> None:
        require_extra("sweep", "EarlyStopping(...)")
        rules = {
            "metric": NAME,
            "mode": checks.MODE,
            "reduction_factor": checks.whole(2),
            "grace_period": checks.COUNT,
        }
        problems = checks.Problems("EarlyStopping", self, rules)
        checks.check_direction(problems, self.metric, self.mode)
        problems.raise_any()


@dataclass(frozen=True, kw_only=True)
class Search:
    """Experiments for `dispatch.map` that an Optuna study suggests, each as soon as workers are free.

    At each suggestion, the study's sampler knows the results of all models that have ended. The study's pruner, by
    default a `MedianPruner`, stops models early. The pruner sees the records of rank 0 that have both `epoch` and the
    metric. The first record of an epoch counts.

    Raises:
        ValueError: A field's value is invalid.

    Examples:
        >>> import optuna
        >>> from flytekitplugins.daskpytorch import Search, dispatch
        >>> def suggest(trial: optuna.Trial) -> float:
        ...     return trial.suggest_float("rate", 0.01, 1.0, log=True)
        >>> def train(rate: float) -> float:
        ...     return (rate - 0.3) ** 2  # stands for a held-out loss
        >>> study = optuna.create_study(direction="minimize")
        >>> models = dispatch.map(client, train, Search(study=study, suggest=suggest, num_models=4))
        >>> min(models.result()) == study.best_value
        True
    """

    study: optuna.Study
    """Study from `optuna.create_study`, possibly with a storage. Each trial gets the index of its model as
    `user_attrs["model"]`."""
    suggest: Callable[[optuna.Trial], Any]
    """Function that returns a trial's experiment, the argument of the trained function, by calls such as
    `trial.suggest_float`. Called only in the process that calls `dispatch.map`."""
    num_models: int
    """Number of models to train, and so of trials in the study, from 1 up."""
    metric: str | None = None
    """Name of the metric whose newest value, as logged by rank 0, is the result of a finished model. None: the result
    is the return value of rank 0, and no model is stopped early. Rank 0 returns a number, or several for a study with
    several directions."""

    def __post_init__(self) -> None:
        rules = {
            "study": checks.must_be("an optuna.Study", lambda study: hasattr(study, "ask") and hasattr(study, "tell")),
            "suggest": checks.must_be("a function that makes an experiment of a trial", callable),
            "num_models": checks.COUNT,
            "metric": checks.optional(NAME),
        }
        checks.Problems("Search", self, rules).raise_any()
