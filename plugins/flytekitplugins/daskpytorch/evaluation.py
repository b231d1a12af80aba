"""Settings of evaluations beside a training, with their checks. Imports little, since every rank and agent loads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from flytekitplugins.daskpytorch import checks

__all__ = ["Evaluate"]


@dataclass(frozen=True)
class Evaluate:
    """Evaluation of a gang's checkpoints by a gang of its own, beside the training: `Gang(evaluate=...)`.

    One checkpoint is evaluated at a time. Of the checkpoints that arrive meanwhile, only the newest is evaluated next.
    The others are skipped, and counted at the end. A failed evaluation, or the loss of its workers, costs this
    evaluation alone: a notice names the rank and the cause, and the training goes on.

    The metrics go to trackers, displays, the Deck and `records`, under the checkpoint's step. The checkpoint gets the
    metrics, too, as if it had been saved with them, so that `Gang(keep=Keep(best=..., metric=...))` ranks it.

    Raises:
        ValueError: A field's value is invalid.

    Examples:
        Train on one of two workers, and evaluate on the other:

        >>> from flytekitplugins.daskpytorch import Evaluate, Gang, Keep, current_rank, dispatch
        >>> def evaluate(target: int) -> dict[str, float]:
        ...     state = current_rank().checkpoint.load()
        ...     return {"held_out_loss": (state["weight"] - target) ** 2}
        >>> def train(target: int) -> int:
        ...     checkpoint = current_rank().checkpoint
        ...     for step in (1, 2):
        ...         checkpoint.save({"weight": 3 - step}, step)
        ...         checkpoint.flush()  # since these steps take no time
        ...     checkpoint.load(best=True)  # waits for the evaluations
        ...     return checkpoint.loaded.step
        >>> gang = Gang(evaluate=Evaluate(evaluate), keep=Keep(best=1, metric="held_out_loss"))
        >>> dispatch.run(client, train, target=2, gang=gang).result()
        [1]
    """

    function: Callable[..., Mapping[str, Any]]
    """Function that every rank of the evaluation's gang calls. `current_rank().checkpoint.load()` or `load_sharded`
    gives the checkpoint. Arguments have the names of the task's inputs, or of the arguments of the function of
    `dispatch.run`, and get their values. Rank 0 returns the metrics: numbers or one-element tensors by name."""
    _: KW_ONLY
    workers: int = 1
    """Number of the cluster's workers that are kept for evaluations, each with as many ranks as a worker of the
    training. 0: one rank beside the ranks of the training, on their node or on one of their workers."""
    every: int = 1
    """Number of kept checkpoints from one evaluation to the next. 1: each checkpoint is due. Each attempt of a task
    counts anew, and also evaluates the checkpoint from which it starts, unless that one was evaluated before."""
    timeout: float = 1800.0
    """Longest time of one evaluation, in seconds. After the training's end, the gang waits at most this long for
    unfinished evaluations. `load(best=True)` waits at most this long, too."""

    def __post_init__(self) -> None:
        rules = {
            "function": checks.must_be("a function", callable),
            "workers": checks.whole(0),
            "every": checks.COUNT,
            "timeout": checks.SECONDS,
        }
        checks.Problems("Evaluate", self, rules).raise_any()


def check_workers(
    problems: checks.Problems, evaluate: Evaluate | None, least: int | None, number: int, name: str, prefix: str = ""
) -> None:
    """Note problems if there are too few workers for a gang's `evaluate` and `min_workers`.

    Args:
        problems: Problems of the owner, which has the gang's settings as attributes.
        evaluate: The gang's evaluation, or None.
        least: The gang's `min_workers`.
        number: Number of workers, from 1 up.
        name: Name of the setting with this number.
        prefix: Text before the names of the gang's settings, such as `gang.`.
    """
    num_kept = evaluate.workers if evaluate is not None else 0
    if num_kept >= number:
        problems.unless(False, f"{prefix}evaluate.workers", f"less than {name}, which is {number}")
    else:
        less = f" less the {num_kept} of evaluate" if num_kept else ""
        is_few = (least or 1) <= number - num_kept
        problems.unless(is_few, f"{prefix}min_workers", f"at most {name}{less}, which is {number - num_kept}")
