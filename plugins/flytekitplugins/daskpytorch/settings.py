"""What a user may ask of a gang, and whether it makes sense. Imports nothing: every rank and every agent reads it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from flytekit import Secret

__all__ = [
    "SCHEDULER_VARIABLE",
    "WANDB_MODES",
    "EarlyStopping",
    "Gang",
    "Problems",
    "Wandb",
    "is_count",
    "is_local",
    "is_positive",
]

SCHEDULER_VARIABLE = "DASK_SCHEDULER_ADDRESS"
"""Set by the Dask operator in the job-runner's pod."""

BACKENDS = ("auto", "gloo", "nccl")
WANDB_MODES = ("online", "offline", "disabled")
MODES = ("min", "max")


@dataclass(frozen=True, kw_only=True)
class Gang:
    """How the ranks of one training run are formed."""

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """The process group's backend; `auto` is nccl where every rank has a GPU of its own, else gloo."""
    ranks_per_worker: int | Literal["auto"] = "auto"
    """Ranks on each Dask worker; `auto` is the number of GPUs in the worker's limits, else 1."""
    min_workers: int | None = None
    """Start, and go on after losses, with at least this many workers; None waits for all of them."""
    max_restarts: int = 3
    """How often a failed gang starts again from its newest checkpoint: this often after losses of infrastructure, and
    as often after errors of the function. The same error at the same step twice ends it before. 0: never."""
    start_timeout: float = 600.0
    """Seconds within which the scheduler answers, the workers come, or come back, and all ranks form their process
    group."""
    hang_timeout: float | None = None
    """Seconds without a sign of life after which a rank counts as hung; None: never. Signs of life are optimizer steps
    and the calls of `log`, `should_stop` and `checkpoint` on `current_rank()`: allow for the longest time between two,
    the evaluation and the start of the training included."""

    def __post_init__(self) -> None:
        problems = Problems("Gang")
        problems.unless(self.backend in BACKENDS, "backend", self.backend, f"one of {', '.join(BACKENDS)}")
        problems.unless(
            self.ranks_per_worker == "auto" or is_count(self.ranks_per_worker),
            "ranks_per_worker",
            self.ranks_per_worker,
            "'auto' or a whole number from 1 up",
        )
        problems.unless(
            self.min_workers is None or is_count(self.min_workers),
            "min_workers",
            self.min_workers,
            "None or a whole number from 1 up",
        )
        problems.unless(
            self.max_restarts == 0 or is_count(self.max_restarts),
            "max_restarts",
            self.max_restarts,
            "a whole number from 0 up",
        )
        problems.unless(is_positive(self.start_timeout), "start_timeout", self.start_timeout, "seconds above 0")
        problems.unless(
            self.hang_timeout is None or is_positive(self.hang_timeout),
            "hang_timeout",
            self.hang_timeout,
            "None or seconds above 0",
        )
        problems.raise_any()


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """Which of many models are stopped before their training's end: asynchronous successive halving (Li et al. 2018).

    A model is compared at its rungs, after `grace_period`, `grace_period * reduction_factor`, `grace_period *
    reduction_factor**2`, ... epochs, with the values that all models had there so far, and goes on if it is among the
    best `1 / reduction_factor` of them; of fewer than twice `reduction_factor`, if it is the best. Nobody waits for
    others, so the first at a rung always goes on.
    """

    metric: str
    """What is compared. It is taken from those of rank 0's `log` records that have both `epoch`, which should count
    from 1, and this name; the first of an epoch counts, so log it at the epoch's end. A model whose metric is not a
    number (NaN) at a rung is stopped."""
    mode: Literal["min", "max"] = "min"
    """Whether low or high values are good."""
    reduction_factor: int = 4
    """One in so many goes on."""
    grace_period: int = 1
    """Epochs that every model gets."""

    def __post_init__(self) -> None:
        problems = Problems("EarlyStopping")
        problems.unless(isinstance(self.metric, str) and bool(self.metric), "metric", self.metric, "a metric's name")
        problems.unless(self.mode in MODES, "mode", self.mode, f"one of {', '.join(MODES)}")
        problems.unless(
            is_count(self.reduction_factor) and self.reduction_factor > 1,
            "reduction_factor",
            self.reduction_factor,
            "a whole number from 2 up",
        )
        problems.unless(is_count(self.grace_period), "grace_period", self.grace_period, "a whole number from 1 up")
        problems.raise_any()


@dataclass(frozen=True, kw_only=True)
class Wandb:
    """One Weights & Biases run for the whole gang, fed by rank 0."""

    project: str
    """The project that the run belongs to."""
    entity: str | None = None
    """The user or team; None is the key's default."""
    secret: Secret | None = None
    """The Flyte secret that holds the API key; None takes the key from `WANDB_API_KEY`."""
    mode: Literal["online", "offline", "disabled"] | None = None
    """None is online with a key, else offline with one line of notice; never a prompt."""
    id: str | None = None
    """The run's id; None derives it from the execution and the node, so that a retry continues the run."""
    name: str | None = None
    """The run's display name; None is the task's name."""
    group: str | None = None
    """Groups runs on the project's page."""
    tags: tuple[str, ...] = ()
    """Labels of the run."""
    config: dict[str, Any] = field(default_factory=dict)
    """Added to the run's configuration beside the task's inputs and the gang's shape."""
    host: str = "https://wandb.ai"
    """The server whose page the Flyte console links to."""
    dir: str | None = None
    """Where offline runs are written; None is `WANDB_DIR`, or the directory that the task was started in."""

    def __post_init__(self) -> None:
        problems = Problems("Wandb")
        problems.unless(bool(self.project), "project", self.project, "a project's name")
        problems.unless(
            self.mode is None or self.mode in WANDB_MODES, "mode", self.mode, f"None or one of {', '.join(WANDB_MODES)}"
        )
        problems.raise_any()


def is_local() -> bool:
    """Whether a task makes its own cluster in this process, because no backend gave it one."""
    return not os.environ.get(SCHEDULER_VARIABLE)


class Problems:
    """Gathers everything that is wrong with one config, so that a user sees it all at once."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._found: list[str] = []

    def unless(self, ok: bool, name: str, value: object, allowed: str) -> None:
        """Note a problem with the field unless it is `ok`."""
        if not ok:
            self._found.append(f"{self._owner}({name}={value!r}): must be {allowed}")

    def raise_any(self) -> None:
        """Raise one `ValueError` that names every problem found."""
        if self._found:
            raise ValueError("; ".join(self._found))


def is_count(value: object) -> bool:
    """Whether it is a whole number from 1 up."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_positive(value: object) -> bool:
    """Whether it is a number above 0."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
