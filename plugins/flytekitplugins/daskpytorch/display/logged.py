"""Log records of rank 0 and the gang's goodput, as the caller of `dispatch` reads them. Runs in the driver."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from flytekitplugins.daskpytorch.protocol.observer import GoodputObserver
from flytekitplugins.daskpytorch.records import Goodput, LogRecord

MAX_RECORDS = 100_000
"""Maximum number of stored log records: about 46 MB of the driver's memory. Beyond, the oldest are removed."""


class Log(GoodputObserver):
    """Observer that collects the log records, newest metrics and goodput of one gang."""

    def __init__(self, before: Sequence[LogRecord] = ()) -> None:
        self._before = before
        """Log records from an earlier call of `dispatch.map`.

        A gang that resumes from a checkpoint restores the records up to the checkpoint's step.
        """
        self.records: list[LogRecord] = []
        self.newest: dict[str, Any] = {}
        """Newest value of each metric, by name."""

    def logged(self, record: LogRecord) -> None:
        """Store a log record of rank 0. Records of other ranks are ignored."""
        if record.rank == 0:
            self.records.append(bare := record.bare())
            del self.records[:-MAX_RECORDS]
            self.newest = {**self.newest, **bare.metrics}  # a new dictionary, since other threads read the old one

    def calling(self, name: str) -> None:
        """Remove the records of a staying gang's earlier calls."""
        self.cut(())

    def resumed(self, step: int) -> None:
        """Restore an earlier call's records up to `step`, the step of the checkpoint that the gang resumes from."""
        self.cut(self._before, step)

    def restarting(self, reason: str, step: int | None) -> None:
        """Remove the records after `step`, the restart's checkpoint, which will be logged again. None: all records."""
        self.cut(self.records, -math.inf if step is None else step)

    def cut(self, records: Sequence[LogRecord], step: float = math.inf) -> None:
        """Replace the stored records by the given ones, up to and including a step."""
        self.records = [record for record in records if record.step <= step]
        self.newest = {name: value for record in self.records for name, value in record.metrics.items()}


class Logged:
    """Base of futures that also have rank 0's log records, during the training and after its end."""

    _log: Log

    @property
    def records(self) -> list[LogRecord]:
        """The newest 100,000 log records of rank 0, with numbers and strings.

        A restart removes the records that will be logged again.
        """
        return list(self._log.records)

    @property
    def metrics(self) -> Mapping[str, Any]:
        """Newest value of each metric, by name."""
        return dict(self._log.newest)

    @property
    def step(self) -> int | None:
        """Step of rank 0's last log record. None without records."""
        logged = (record.step for record in reversed(self._log.records) if not record.is_evaluation)
        return next(logged, None)

    @property
    def goodput(self) -> Goodput | None:
        """Account of the gang's time, updated every two seconds during training.

        None before the training, and for a model that an earlier call of `dispatch.map` has completed.
        """
        return self._log.goodput
