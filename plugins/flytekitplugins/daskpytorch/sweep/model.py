"""One of many models: its future, what it has logged, and what its gang is asked for. Runs in the driver."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any, Literal

from flytekitplugins.daskpytorch.context import LogRecord
from flytekitplugins.daskpytorch.driver.futures import GangFuture, GangFutures
from flytekitplugins.daskpytorch.driver.received import ReceivedResults
from flytekitplugins.daskpytorch.errors import StoppedEarlyError
from flytekitplugins.daskpytorch.goodput import Goodput
from flytekitplugins.daskpytorch.process.streams import one_line, without_secrets
from flytekitplugins.daskpytorch.protocol.observer import Observer
from flytekitplugins.daskpytorch.sweep.storage import Kept, ModelStorage

MAX_SHOWN = 100
"""Characters of an experiment in a future's representation."""


class ModelFuture(GangFuture):
    """The future of one model: rank 0's return value.

    Where the model was stopped early, `result` raises `StoppedEarlyError` and `exception` returns it.
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
        """The experiment's place among all."""
        self.experiment = experiment
        """What the model is trained with; of a search None until it begins."""
        self._log = log
        self._cancel = cancel

    @property
    def records(self) -> list[LogRecord]:
        """What rank 0 has logged so far: its numbers and strings; after a restart, without what will come again."""
        return list(self._log.records)

    @property
    def metrics(self) -> Mapping[str, Any]:
        """The newest value of each metric in `records`."""
        return dict(self._log.newest)

    @property
    def step(self) -> int | None:
        """That of the last of `records`; None where there is none."""
        records = self._log.records
        return records[-1].step if records else None

    @property
    def goodput(self) -> Goodput | None:
        """Where its time has gone, at most two seconds ago while it trains; None before, and of an earlier call's."""
        return self._log.goodput

    @property
    def status(self) -> Literal["waiting", "training", "finished", "stopped early", "failed", "cancelled"]:
        """How it stands with the model."""
        if not self.done():
            return "training" if self.running() else "waiting"
        match error_of(self):
            case None:
                return "finished"
            case StoppedEarlyError():
                return "stopped early"
            case CancelledError():
                return "cancelled"
        return "failed"

    def __repr__(self) -> str:
        return (
            f"<ModelFuture {self.index}: {self.status}, {one_line(repr(without_secrets(self.experiment)), MAX_SHOWN)}>"
        )

    def cancel(self) -> bool:
        """Do not train the model, or end its training; False where that was over before."""
        return self._cancel()


class Log(Observer):
    """What a model has logged so far."""

    def __init__(self, before: Sequence[LogRecord] = ()) -> None:
        self._before = before
        """By the attempt before, which a gang may go on from."""
        self.records: list[LogRecord] = []
        self.newest: dict[str, Any] = {}
        """Of each metric."""
        self.goodput: Goodput | None = None

    def accounted(self, goodput: Goodput) -> None:
        """Have the newest."""
        self.goodput = goodput

    def logged(self, record: LogRecord) -> None:
        """Have one of rank 0, too."""
        if record.rank == 0:
            self.records.append(bare := record.bare())
            self.newest = {**self.newest, **bare.metrics}  # another, since others read it meanwhile

    def resumed(self, step: int) -> None:
        """Have those of the attempt before."""
        self.cut(self._before, step)

    def restarting(self, reason: str, step: int | None) -> None:
        """Forget those that will come again."""
        self.cut(self.records, -math.inf if step is None else step)

    def cut(self, records: Sequence[LogRecord], step: float = math.inf) -> None:
        """Have these, up to a step."""
        self.records = [record for record in records if record.step <= step]
        self.newest = {name: value for record in self.records for name, value in record.metrics.items()}


@dataclass(eq=False, kw_only=True)
class Model:
    """All that the driver has of one."""

    index: int
    line: Observer
    """Of the sweep display."""
    kept: Kept | None = None
    """From the attempt before."""
    experiment: Any = None
    num_workers: int = 0
    storage: ModelStorage | None = None
    log: Log = field(init=False)
    future: ModelFuture = field(init=False)
    gang: GangFutures | None = None
    """While it is being trained."""

    def __post_init__(self) -> None:
        self.log = Log(self.kept.records if self.kept is not None else ())

    def settle(self, result: Any, error: BaseException | None) -> None:
        """Have its future end."""
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)


def error_of(future: Future[Any]) -> BaseException | None:
    """What a future ends with that has no result, `CancelledError` included."""
    try:
        return future.exception()
    except BaseException as error:  # cancelled
        return error
