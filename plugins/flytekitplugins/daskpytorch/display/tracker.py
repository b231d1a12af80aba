"""Observer that feeds a tracker's run, and its thread: a slow tracker never delays the training.

Runs in the driver, which outlives all ranks. No worker needs to reach the tracker's server.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from flytekitplugins.daskpytorch.display.run_state import View
from flytekitplugins.daskpytorch.display.training import MAX_RANKS, amounts, run_config
from flytekitplugins.daskpytorch.errors import PreemptedError
from flytekitplugins.daskpytorch.process.streams import say
from flytekitplugins.daskpytorch.process.worker import Worker
from flytekitplugins.daskpytorch.protocol import journal
from flytekitplugins.daskpytorch.protocol.journal import Training
from flytekitplugins.daskpytorch.records import Histogram, LogRecord, Picture

Job = Callable[[], object]
MAX_WAITING = 10_000
INTERVAL = 2.0
"""Seconds between two flushes."""


def public(uri: str) -> str:
    return re.sub(r"//[^/@]*@", "//", uri).rstrip("/")


State = Literal["finished", "failed", "killed"]
STATES: Mapping[str, State] = {"done": "finished", "stopped early": "finished", "failed": "failed"}

CLOSE_TIMEOUT = 60.0
PREEMPTED_TIMEOUT = 3.0


class Run:
    """Base class for a tracker's run, for example in MLflow. One thread makes all calls, one after the other.

    The tracker's own client repeats failed requests. After an error of `open`, nothing is recorded. Any other method's
    failed call is skipped.
    """

    label: str
    where: str | None = None
    """Address for the user. None until `open` has set it."""

    def open(self, training: Training, config: Mapping[str, Any], step: int | None) -> None:
        """Begin the tracker's run, or resume that of an earlier attempt.

        `config` has inputs and the gang's shape. `step` is that of the checkpoint from which the gang resumes.
        """
        raise NotImplementedError

    def rewind(self, step: int | None) -> None:
        """Prepare for a restart, after which the records after `step` are logged again. None: all records."""

    def log(self, record: LogRecord) -> None:
        raise NotImplementedError

    def draw(self, record: LogRecord, name: str, drawing: Histogram | Picture) -> None:
        """Log a histogram or picture of a record."""

    def flush(self) -> None:
        """Send the queued values."""

    def close(self, state: State, reason: str | None) -> None:
        """End the tracker's run. `reason` is None for a finished training."""
        raise NotImplementedError


class Tracker(View):
    def __init__(self, run: Run) -> None:
        self._run = run
        self._worker = Worker(name=run.label)
        self._is_open = False
        self._flushed_at = 0.0
        self._num_dropped = 0
        self._said: set[str] = set()

    def places(self) -> Mapping[str, str]:
        return {self._run.label: self._run.where} if self._run.where is not None else {}

    def on_event(self, event: journal.Event) -> None:
        match event:
            case journal.Placed(shape=shape) if self.state.attempt == 0 and self.state.training is not None:
                training, step = self.state.training, self.state.checkpoint and self.state.checkpoint[0]
                self._is_open, self._flushed_at = True, time.monotonic()
                begin = partial(self._run.open, training, run_config(training, shape), step)
                self._worker.submit(begin, self._gives_up_all)
            case journal.Restarted(step=step):
                self._put(partial(self._run.rewind, step))
            case journal.Logged(record=record) if record.rank == 0:
                self._offer(partial(self._run.log, record))
                for name, drawing in record.drawings.items():
                    self._offer(partial(self._run.draw, record, name, drawing))
            case journal.Used(usage=usage) if usage.rank < MAX_RANKS:
                self._add({f"usage/rank {usage.rank}/{name}": value for name, value in amounts(usage).items()})
            case journal.Ended() if self._is_open:
                self._end(event)

    def _add(self, metrics: Mapping[str, float]) -> None:
        if (newest := self.state.values.record) is not None:
            self._offer(partial(self._run.log, replace(newest, time=time.time(), metrics=metrics)))

    def _offer(self, job: Job) -> None:
        if not self._is_open:
            return
        if len(self._worker.jobs) >= MAX_WAITING:
            self._num_dropped += 1
            return
        self._put(job)
        if time.monotonic() - self._flushed_at >= INTERVAL:
            self._flushed_at = time.monotonic()
            self._put(self._run.flush)

    def _put(self, job: Job) -> None:
        self._worker.submit(job, self._gives_up)

    def _end(self, event: journal.Ended) -> None:
        if (goodput := self.state.goodput) is not None:
            account = {"share": goodput.share, **goodput.as_dict(), **goodput.bill}
            self._add({f"goodput/{name}": value for name, value in account.items()})
        reason = f"{event.end.error}: {event.end.text}" if event.end.error else None
        self._put(self._run.flush)
        self._put(partial(self._run.close, STATES.get(event.end.word, "killed"), reason))
        has_all = self._worker.flush(PREEMPTED_TIMEOUT if isinstance(event.error, PreemptedError) else CLOSE_TIMEOUT)
        if not self._is_open:  # the run could not be opened meanwhile
            return
        self._is_open = False
        self._worker.close()
        if not has_all:
            self._say("the newest records could not be written in time: check that its server or storage answers")
        if self._num_dropped:
            self._say(f"too slow; {self._num_dropped} records were dropped. Log less often to keep all")

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            say(f"{self._run.label}: {text}")

    # ---- in the thread

    def _gives_up_all(self, error: Exception, *_: object) -> bool:
        self._is_open = False
        self._worker.close()
        return self._gives_up(error)

    def _gives_up(self, error: Exception, *_: object) -> bool:
        self._say(f"{type(error).__name__}: {public(str(error))}. The training goes on, with records missing.")
        return True
