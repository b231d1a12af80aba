"""A tracker's run, fed in the driver by a thread, so that a slow server, or none, never slows the training.

In the driver rather than in rank 0: there it outlives every rank and every attempt, knows what the gang goes back to
and how it ends, and no worker needs to reach the server.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from flytekitplugins.daskpytorch.context import LogRecord
from flytekitplugins.daskpytorch.display.training import gang_config
from flytekitplugins.daskpytorch.display.usage import GIB
from flytekitplugins.daskpytorch.driver.brain import GangCancelledError
from flytekitplugins.daskpytorch.errors import PreemptedError, StoppedEarlyError
from flytekitplugins.daskpytorch.goodput import Goodput, RankUsage
from flytekitplugins.daskpytorch.process.log import say
from flytekitplugins.daskpytorch.protocol.observer import Observer, Shape, Training

State = Literal["finished", "failed", "killed"]

MAX_WAITING = 10_000
"""Records that wait for the tracker before further ones are dropped, with a notice."""
INTERVAL = 2.0
"""Seconds after which what has come goes on at the latest."""
STALL = 10.0
"""Seconds at the end for a server that does not answer, before the rest is given up."""
CLOSE_TIMEOUT = 60.0
"""Seconds at the end for all that waits."""
PREEMPTED_TIMEOUT = 3.0
"""The same where the task is told to end."""
MAX_RANKS = 8
"""Whose use of their machines is recorded: of larger gangs that of the first ranks."""
FIRST_PAUSE, MAX_PAUSE = 0.5, 15.0
"""Seconds before an attempt to reach a server again."""


class Run:
    """What a tracker does, one call after the other, in its thread.

    What raises a `ConnectionError` is called again until it does not. After another error of `open` the run is given
    up, after one of the others that call.
    """

    label: str
    """The tracker's name."""
    where: str | None = None
    """The run's place, once that is known."""

    def open(self, training: Training, config: Mapping[str, Any], step: int | None) -> None:
        """Begin the run, or go on with that of an attempt before, from this step; None: from the beginning."""
        raise NotImplementedError

    def rewind(self, step: int | None) -> None:
        """What was logged after this step will come again; None: all."""

    def log(self, record: LogRecord) -> None:
        """Take a record."""
        raise NotImplementedError

    def note(self, text: str) -> None:
        """Take something that a user should read."""

    def flush(self) -> None:
        """Send on what waits here."""

    def close(self, state: State, reason: str | None) -> None:
        """End the run; `reason` is why it has not finished, or was stopped early."""
        raise NotImplementedError


class Tracker(Observer):
    """Tells a run of what happens in a gang. Calls return at once, and no failure reaches the training."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._waiting: queue.Queue[Callable[[], None]] = queue.Queue()
        self._thread = threading.Thread(target=self._feed, name=f"daskpytorch-{run.label}", daemon=True)
        self._training: Training | None = None
        self._open: Callable[[], None] | None = None
        self._resumed_at: int | None = None
        self._newest: LogRecord | None = None
        self._goodput: Goodput | None = None
        self._num_dropped = 0
        self._num_done = 0
        self._is_unanswered = False
        """The last call did not reach the server."""
        self._said: set[str] = set()
        self._is_over = False
        self._is_given_up = threading.Event()

    def places(self) -> Mapping[str, str]:
        """The run's."""
        return {self._run.label: self._run.where} if self._run.where is not None else {}

    def begins(self, training: Training) -> None:
        """Note what it is."""
        self._training = training

    def resumed(self, step: int) -> None:
        """Note from where."""
        self._resumed_at = step

    def placed(self, shape: Shape) -> None:
        """Open the run, if it is not open."""
        if self._training is not None and self._open is None:
            config = {**self._training.inputs, "gang": gang_config(shape)}
            self._open = partial(self._run.open, self._training, config, self._resumed_at)
            self._thread.start()

    def restarting(self, reason: str, step: int | None) -> None:
        """Go back."""
        self._newest = None
        self._waiting.put(partial(self._run.rewind, step))

    def logged(self, record: LogRecord) -> None:
        """Queue a record of rank 0."""
        if record.rank == 0:
            self._newest = record
            self._offer(partial(self._run.log, record))

    def used(self, usage: RankUsage) -> None:
        """Queue what a rank uses, as metrics of the newest step."""
        if usage.rank < MAX_RANKS:
            self._add({f"usage/rank {usage.rank}/{name}": value for name, value in _amounts(usage).items()})

    def accounted(self, goodput: Goodput) -> None:
        """Keep it for the end."""
        self._goodput = goodput

    def _add(self, metrics: Mapping[str, float]) -> None:
        """Queue metrics of our own, if there is a step that they can belong to."""
        if (newest := self._newest) is not None:
            self._offer(partial(self._run.log, replace(newest, time=time.time(), metrics=metrics)))

    def noted(self, text: str) -> None:
        """Queue it."""
        self._offer(partial(self._run.note, text))

    def ended(self, error: Exception | None) -> None:
        """Close the run, and wait until all has got through, or nothing does any more."""
        if self._open is None or not self._thread.is_alive():
            return
        if self._goodput is not None:
            account = {"share": self._goodput.share, **self._goodput.as_dict()}
            self._add({f"goodput/{name}": value for name, value in account.items()})
        self._waiting.put(self._run.flush)
        self._waiting.put(partial(self._end, error))
        self._wait(PREEMPTED_TIMEOUT if isinstance(error, PreemptedError) else CLOSE_TIMEOUT)
        self._is_given_up.set()
        if self._thread.is_alive():
            self._say(f"{self._waiting.qsize() + 1} of the last records and notes were not taken in time")
        if self._num_dropped:
            self._say(f"too slow; {self._num_dropped} records were dropped")

    def _wait(self, limit: float) -> None:
        deadline = time.monotonic() + limit
        while self._thread.is_alive() and (left := deadline - time.monotonic()) > 0:
            before = self._num_done
            self._thread.join(min(left, STALL))
            if self._is_unanswered and self._num_done == before:
                return

    def _offer(self, job: Callable[[], None]) -> None:
        if self._open is not None and not self._thread.is_alive():  # it could not be opened
            return
        if self._waiting.qsize() >= MAX_WAITING:
            self._num_dropped += 1
        else:
            self._waiting.put(job)

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            say(f"{self._run.label}: {text}")

    # ---- in the thread

    def _feed(self) -> None:
        try:
            if self._open is not None:
                self._until_it_answers(self._open)
        except Exception as error:  # whatever a tracker's library raises
            self._say(f"{type(error).__name__}: {error}. Nothing is recorded; the training goes on.")
            return
        flushed_at = time.monotonic()
        while not self._is_over:
            with contextlib.suppress(queue.Empty):
                self._try(self._waiting.get(timeout=INTERVAL))
            if time.monotonic() - flushed_at >= INTERVAL:
                self._try(self._run.flush)
                flushed_at = time.monotonic()

    def _try(self, job: Callable[[], None]) -> None:
        try:
            self._until_it_answers(job)
        except Exception as error:  # the same
            self._say(f"{type(error).__name__}: {error}. Such records are left out; the training goes on.")
        self._num_done += 1

    def _until_it_answers(self, job: Callable[[], None]) -> None:
        pause = FIRST_PAUSE
        while not self._is_given_up.is_set():
            try:
                job()
            except ConnectionError as error:
                self._is_unanswered = True
                self._say(f"{error}; what is logged waits for it, and the training goes on")
            else:
                self._is_unanswered = False
                return
            self._is_given_up.wait(pause)
            pause = min(2 * pause, MAX_PAUSE)
        self._is_over = True

    def _end(self, error: Exception | None) -> None:
        self._is_over = True
        self._run.close(*_state(error))


def _amounts(usage: RankUsage) -> dict[str, float]:
    amounts = {"cpu_cores": usage.cpu, "memory_gib": usage.memory / GIB}
    if usage.gpu_memory is not None:
        amounts["gpu_memory_gib"] = usage.gpu_memory / GIB
    if usage.gpu_utilization is not None:
        amounts["gpu_percent"] = 100 * usage.gpu_utilization
    return amounts


def _state(error: Exception | None) -> tuple[State, str | None]:
    reason = None if error is None else f"{type(error).__name__}: {error}"
    if error is None or isinstance(error, StoppedEarlyError):
        return "finished", reason
    return "killed" if isinstance(error, (GangCancelledError, PreemptedError)) else "failed", reason
