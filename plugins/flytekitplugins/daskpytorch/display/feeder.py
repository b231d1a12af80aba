"""Thread that feeds a tracker, so that a slow server never delays the training. Runs in the driver and in rank 0."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from functools import partial

from flytekitplugins.daskpytorch.process.log import say

Job = Callable[[], object]
MAX_WAITING = 10_000
"""Maximum number of records in the queue. Further records are dropped, with a notice."""
INTERVAL = 2.0
"""Minimum number of seconds between two flushes of the tracker."""
STALL = 10.0
"""Timeout, in seconds, at the end for a server that cannot be reached. The rest of the queue is then dropped."""
FIRST_PAUSE, MAX_PAUSE = 0.5, 15.0
"""First and longest pause, in seconds, before another attempt to reach a server."""


class Feeder:
    """Thread that calls queued jobs in their order. Callers never wait, and no job's error reaches a caller.

    A job is called again after a `ConnectionError`, and skipped after any other error.
    """

    def __init__(self, label: str, flush: Job | None = None) -> None:
        """Prepare the thread.

        Args:
            label: Name of the tracker for notices.
            flush: Job that the thread calls every `INTERVAL` seconds. None: no job.
        """
        self._label = label
        self._flush = flush
        self._begin: Job = lambda: None
        self.has_begun = threading.Event()
        """Set after the first job has returned or failed."""
        self._waiting: queue.Queue[Job] = queue.Queue()
        self._thread = threading.Thread(target=self._feed, name=f"daskpytorch-{label}", daemon=True)
        self._num_dropped = 0
        self._num_done = 0
        self._is_unanswered = False
        """True if the newest call failed to reach the server."""
        self._said: set[str] = set()
        self._is_over = False
        self._is_given_up = threading.Event()

    def start(self, begin: Job) -> None:
        """Start the thread with its first job. If this job fails, the thread ends."""
        self._begin = begin
        self._thread.start()

    @property
    def is_feeding(self) -> bool:
        """True from the start until the last job, unless the first job has failed."""
        return self._thread.is_alive()

    def offer(self, job: Job) -> None:
        """Queue a record, or drop the record if the queue is full or the thread has ended."""
        if self.has_begun.is_set() and not self.is_feeding:
            return
        if self._waiting.qsize() >= MAX_WAITING:
            self._num_dropped += 1
        else:
            self._waiting.put(job)

    def put(self, job: Job) -> None:
        """Queue a job, even if the queue is full."""
        self._waiting.put(job)

    def drain(self, limit: float) -> None:
        """Wait for the jobs in the queue, at most `limit` seconds."""
        is_done = threading.Event()
        self.put(is_done.set)
        if self.is_feeding:
            is_done.wait(limit)

    def end(self, job: Job, limit: float) -> None:
        """Queue the last job and wait for the end of the thread. Only the first call counts.

        Returns after `limit` seconds at the latest. Returns earlier if the newest call failed with a `ConnectionError`
        and no job has ended for `STALL` seconds. A notice gives the number of jobs that were dropped or late.
        """
        if not self.is_feeding:
            return
        self.put(partial(self._last, job))
        self._wait(limit)
        self._is_given_up.set()
        if self.is_feeding:
            self._say(
                f"the last {self._waiting.qsize() + 1} records and notes could not be written in time, and are missing"
            )
        if self._num_dropped:
            self._say(f"too slow; {self._num_dropped} records were dropped. Log less often to keep all")

    def _wait(self, limit: float) -> None:
        deadline = time.monotonic() + limit
        while self.is_feeding and (left := deadline - time.monotonic()) > 0:
            before = self._num_done
            self._thread.join(min(left, STALL))
            if self._is_unanswered and self._num_done == before:
                return

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            say(f"{self._label}: {text}")

    # ---- in the thread

    def _feed(self) -> None:
        try:
            self._until_it_answers(self._begin)
        except Exception as error:  # a tracker's library may raise anything
            self._say(f"{type(error).__name__}: {error}. Nothing is recorded. The training goes on.")
            return
        finally:
            self.has_begun.set()
        flushed_at = time.monotonic()
        while not self._is_over:
            with contextlib.suppress(queue.Empty):
                self._try(self._waiting.get(timeout=INTERVAL))
            if self._flush is not None and time.monotonic() - flushed_at >= INTERVAL:
                self._try(self._flush)
                flushed_at = time.monotonic()

    def _try(self, job: Job) -> None:
        try:
            self._until_it_answers(job)
        except Exception as error:  # a job may raise anything
            self._say(f"{type(error).__name__}: {error}. Such records are left out. The training goes on.")
        self._num_done += 1

    def _until_it_answers(self, job: Job) -> None:
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

    def _last(self, job: Job) -> None:
        self._is_over = True
        job()
