"""State of one model of a sweep: future, records, experiment and storage. Runs in the driver."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from flytekitplugins.daskpytorch.display.logged import Log, Logged
from flytekitplugins.daskpytorch.driver.futures import GangFuture, GangFutures
from flytekitplugins.daskpytorch.driver.received import ReceivedResults
from flytekitplugins.daskpytorch.errors import StoppedEarlyError
from flytekitplugins.daskpytorch.process.streams import one_line, without_secrets
from flytekitplugins.daskpytorch.protocol.observer import Observer
from flytekitplugins.daskpytorch.sweep.storage import KeptModel, ModelStorage

Status = Literal["training", "failed", "finished", "stopped early", "cancelled", "waiting"]
"""State of a model of a `dispatch.map`."""
STATUSES = get_args(Status)
"""All states of a model, in the order in which displays list them."""
MAX_SHOWN = 100
"""Maximum number of characters of an experiment in the `repr` of its `ModelFuture`."""


class ModelFuture(Logged, GangFuture):
    """Future of one model of a `dispatch.map`. The result is rank 0's return value.

    For a model that was stopped early, `result` raises `StoppedEarlyError` and `exception` returns that error.
    """

    def __init__(
        self,
        index: int,
        experiment: Any,
        log: Log,
        cancel: Callable[[], bool],
        end: Callable[[], bool] | None = None,
    ) -> None:
        super().__init__(ReceivedResults(), end)
        self.index = index
        """Index of the experiment, from 0."""
        self.experiment = experiment
        """Argument of the training function. None in a search until the study suggests an experiment."""
        self._log = log
        self._cancel = cancel

    @property
    def status(self) -> Status:
        """State of the model's training."""
        if not self.done():
            return "training" if self.running() else "waiting"
        return status_of(error_of(self))

    def __repr__(self) -> str:
        return (
            f"<ModelFuture {self.index}: {self.status}, {one_line(repr(without_secrets(self.experiment)), MAX_SHOWN)}>"
        )

    def cancel(self) -> bool:
        """Cancel the model before or during its training. Return False if the training had already ended."""
        return self._cancel()


@dataclass(eq=False, kw_only=True)
class Model:
    """State of one model of a `dispatch.map`, in the driver."""

    index: int
    line: Observer
    """Observer that shows the model in the sweep's display."""
    kept: KeptModel | None = None
    """State that an earlier call of `dispatch.map` left in storage. None for a new model."""
    experiment: Any = None
    num_workers: int = 0
    storage: ModelStorage | None = None
    log: Log = field(init=False)
    future: ModelFuture = field(init=False)
    gang: GangFutures | None = None
    """Futures of the model's gang during training, else None."""

    def __post_init__(self) -> None:
        self.log = Log(self.kept.records if self.kept is not None else ())

    def settle(self, result: Any, error: BaseException | None) -> None:
        """Set the result or the error of the model's future."""
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)


def error_of(future: Future[Any]) -> BaseException | None:
    """Return a future's error, `CancelledError` included, or None if the future has a result."""
    try:
        return future.exception()
    except BaseException as error:  # the future was cancelled
        return error


def status_of(error: BaseException | None) -> Status:
    """Return the final state of a model, from the error of its future. None: the future has a result."""
    match error:
        case None:
            return "finished"
        case StoppedEarlyError():
            return "stopped early"
        case CancelledError():
            return "cancelled"
    return "failed"
