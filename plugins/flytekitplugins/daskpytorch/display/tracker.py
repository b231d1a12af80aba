"""Observer that feeds a tracker's run, and its thread: a slow tracker never delays the training. Runs in the driver.

The driver outlives all ranks and attempts, and knows each restart's step and the outcome. No worker needs to reach the
tracker's server.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from flytekitplugins.daskpytorch.display.run_state import RunState, View
from flytekitplugins.daskpytorch.display.training import MAX_RANKS, amounts, run_config
from flytekitplugins.daskpytorch.errors import PreemptedError
from flytekitplugins.daskpytorch.process.streams import say
from flytekitplugins.daskpytorch.process.worker import Worker
from flytekitplugins.daskpytorch.protocol import journal
from flytekitplugins.daskpytorch.protocol.journal import Training
from flytekitplugins.daskpytorch.records import Histogram, LogRecord, Picture

Job = Callable[[], object]
MAX_WAITING = 10_000
"""Maximum number of records that are queued for a tracker. Further records are dropped, with a notice."""
INTERVAL = 2.0
"""Minimum number of seconds between two flushes of a tracker."""
STALL = 10.0
"""Timeout, in seconds, for an unreachable tracker's server at a gang's end. Queued records are then dropped."""
RETRY_AFTER = 0.5
"""Pause, in seconds, before the first retry of a failed request to a tracker. Each further retry doubles the pause."""
CONNECT_TIMEOUT = 5.0
"""Timeout, in seconds, for a connection to a tracker's server."""


class Feeder:
    """Thread that calls a tracker's queued jobs in their order. No job's error reaches a caller.

    Only `end` waits for jobs. A job is called again after a `ConnectionError`, and skipped after any other error.
    """

    def __init__(self, label: str, flush: Job) -> None:
        """Prepare the thread.

        Args:
            label: Name of the tracker for notices.
            flush: Job that the thread calls between records, at most every `INTERVAL` seconds, and before the last job.
        """
        self._label = label
        self._flush = flush
        self._flushed_at = 0.0
        self.is_feeding = False
        """True from the call of `start` to the end of `end`. False after a failure of the first job."""
        self._worker = Worker(RETRY_AFTER, label)
        self._num_dropped = 0
        self._said: set[str] = set()

    def start(self, begin: Job) -> None:
        """Start the thread with `begin` as its first job. If `begin` fails without a retry, the thread ends."""
        self.is_feeding = True
        self._flushed_at = time.monotonic()
        self._worker.submit(begin, self._gives_up_all)

    def offer(self, job: Job) -> None:
        """Queue a job that writes a record. Drop the job if the queue is full, before `start`, or after `end`."""
        if not self.is_feeding:
            return
        if len(self._worker.jobs()) >= MAX_WAITING:
            self._num_dropped += 1
            return
        self.put(job)
        if time.monotonic() - self._flushed_at >= INTERVAL:
            self._flushed_at = time.monotonic()
            self.put(self._flush)

    def put(self, job: Job) -> None:
        """Queue a job, even if the queue is full."""
        self._worker.submit(job, self._gives_up)

    def end(self, job: Job, limit: float) -> None:
        """Queue the last job, and wait until the queue is empty. Later calls do nothing.

        The wait ends after `limit` seconds, or earlier if the tracker's server cannot be reached for about 10 seconds.
        """
        if not self.is_feeding:
            return
        self.put(self._flush)
        self.put(job)
        self._wait(limit)
        if not self.is_feeding:  # the first job has failed meanwhile
            return
        self.is_feeding = False
        self._worker.close()
        if self._worker.jobs():
            self._say("the newest records could not be written in time: check that its server or storage answers")
        if self._num_dropped:
            self._say(f"too slow; {self._num_dropped} records were dropped. Log less often to keep all")

    def _wait(self, limit: float) -> None:
        deadline, before = time.monotonic() + limit, None
        while self.is_feeding and (left := deadline - time.monotonic()) > 0:
            first = self._worker.first()
            if first is None or (first is before and first.num_failures):
                return
            before = first
            self._worker.flush(min(left, STALL))

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            say(f"{self._label}: {text}")

    # ---- in the thread

    def _gives_up_all(self, error: Exception, *_: object) -> bool:
        if gives_up := self._gives_up(error):
            self.is_feeding = False
            self._worker.close()
        return gives_up

    def _gives_up(self, error: Exception, *_: object) -> bool:
        if isinstance(error, ConnectionError):
            self._say(f"{error}. Check the address and the access to it. Records wait, and the training goes on.")
            return False
        self._say(f"{type(error).__name__}: {error}. The training goes on, with records missing.")
        return True


def knock(uri: str) -> None:
    """Check that a tracker's server accepts connections, since trackers' own clients retry for minutes.

    Addresses other than `http://` and `https://`, and servers behind a proxy, are not checked.

    Raises:
        ConnectionError: The server does not accept a connection.
    """
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return
    if {parts.scheme, "all"} & getproxies().keys() and not proxy_bypass(parts.hostname):  # as in `requests`
        return
    try:
        address = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection(address, timeout=CONNECT_TIMEOUT).close()
    except OSError as error:
        raise ConnectionError(f"{public(uri)} does not answer ({error})") from error


def public(uri: str) -> str:
    """Return a URL without user name and password."""
    return re.sub(r"//[^/@]*@", "//", uri).rstrip("/")


State = Literal["finished", "failed", "killed"]
STATES: Mapping[str, State] = {"done": "finished", "stopped early": "finished", "failed": "failed"}
"""States of a tracker's run by the word of the gang's end. Other ends: killed."""

CLOSE_TIMEOUT = 60.0
"""Timeout, in seconds, for sending a tracker's queued records at the gang's end."""
PREEMPTED_TIMEOUT = 3.0
"""Timeout, in seconds, for sending a tracker's queued records after a preemption."""


class Run:
    """Base class for a tracker's run, for example in MLflow. One thread makes all calls, one after the other.

    A call is repeated after a `ConnectionError`. After any other error of `open`, nothing is recorded. Any other
    method's failed call is skipped.
    """

    label: str
    """Name of the tracker."""
    where: str | None = None
    """Address of the run, for the user. None until `open` has set the address."""

    def open(self, training: Training, config: Mapping[str, Any], step: int | None) -> None:
        """Begin the tracker's run, or resume that of an earlier attempt.

        Args:
            training: Training that the run records.
            config: Configuration of the run: inputs and the gang's shape.
            step: Step of the checkpoint that the gang resumes from. None: the gang starts from the beginning.
        """
        raise NotImplementedError

    def rewind(self, step: int | None) -> None:
        """Prepare for a restart, after which the records after `step` are logged again. None: all records."""

    def log(self, record: LogRecord) -> None:
        """Log a record's numbers and texts in the tracker's run."""
        raise NotImplementedError

    def draw(self, record: LogRecord, name: str, drawing: Histogram | Picture) -> None:
        """Log a histogram or picture of a record in the tracker's run."""

    def note(self, text: str) -> None:
        """Log a notice for the user in the tracker's run."""

    def flush(self) -> None:
        """Send the queued values to the tracker."""

    def close(self, state: State, reason: str | None) -> None:
        """End the tracker's run.

        Args:
            state: Final state of the run.
            reason: Reason for a failure, a cancellation or early stopping. None for a finished training.
        """
        raise NotImplementedError


class Tracker(View):
    """Observer that records a gang's events in a tracker's run. Only the gang's end waits for the tracker.

    No error of the tracker reaches the training.
    """

    def __init__(self, run: Run) -> None:
        self.state = RunState()
        self._run = run
        self._feeder = Feeder(run.label, run.flush)

    def places(self) -> Mapping[str, str]:
        """Return the address of the run, by the tracker's name. Empty until the run is open."""
        return {self._run.label: self._run.where} if self._run.where is not None else {}

    def on_event(self, event: journal.Event) -> None:
        """Queue an event for the run."""
        match event:
            case journal.Placed(shape=shape) if self.state.attempt == 0 and self.state.training is not None:
                training, step = self.state.training, self.state.resumed_step
                self._feeder.start(partial(self._run.open, training, run_config(training, shape), step))
            case journal.Restarted(step=step):
                self._feeder.put(partial(self._run.rewind, step))
            case journal.Logged(record=record) if record.rank == 0:
                self._feeder.offer(partial(self._run.log, record))
                for name, drawing in record.drawings.items():
                    self._feeder.offer(partial(self._run.draw, record, name, drawing))
            case journal.Used(usage=usage) if usage.rank < MAX_RANKS:
                self._add({f"usage/rank {usage.rank}/{name}": value for name, value in amounts(usage).items()})
            case journal.Noted():
                self._feeder.offer(partial(self._run.note, event.line))
            case journal.Ended():
                self._end(event)

    def _add(self, metrics: Mapping[str, float]) -> None:
        """Queue the plugin's own metrics under the newest step, if rank 0 has logged a step."""
        if (newest := self.state.record) is not None:
            self._feeder.offer(partial(self._run.log, replace(newest, time=time.time(), metrics=metrics)))

    def _end(self, event: journal.Ended) -> None:
        """Close the run. Wait until all records are sent, the tracker cannot be reached, or the timeout is over."""
        if not self._feeder.is_feeding:
            return
        if (goodput := self.state.goodput) is not None:
            account = {"share": goodput.share, **goodput.as_dict()}
            self._add({f"goodput/{name}": value for name, value in account.items()})
        limit = PREEMPTED_TIMEOUT if isinstance(event.error, PreemptedError) else CLOSE_TIMEOUT
        reason = f"{event.end.error}: {event.end.text}" if event.end.error else None
        self._feeder.end(partial(self._run.close, STATES.get(event.end.word, "killed"), reason), limit)
