"""Thread that feeds a tracker, so that a slow server never delays the training. Runs in the driver and in rank 0."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from flytekitplugins.daskpytorch.process.log import say
from flytekitplugins.daskpytorch.process.worker import Worker

Job = Callable[[], object]
LANE = "records"
MAX_WAITING = 10_000
"""Maximum number of records in the queue. Further records are dropped, with a notice."""
INTERVAL = 2.0
"""Minimum number of seconds between two flushes of the tracker."""
STALL = 10.0
"""Timeout, in seconds, at the end for a server that cannot be reached. The rest of the queue is then dropped."""
RETRY_AFTER = 0.5
"""Seconds before another attempt to reach a server. Each further attempt doubles the pause."""
CONNECT_TIMEOUT = 5.0
"""Timeout, in seconds, for a connection to a server."""


class Feeder:
    """Thread that calls queued jobs in their order. Callers never wait, and no job's error reaches a caller.

    A job is called again after a `ConnectionError`, and skipped after any other error.
    """

    def __init__(self, label: str, flush: Job | None = None) -> None:
        """Prepare the thread.

        Args:
            label: Name of the tracker for notices.
            flush: Job that the thread calls between records, at most every `INTERVAL` seconds, and before the last job.
                None: no job.
        """
        self._label = label
        self._flush = flush
        self._flushed_at = 0.0
        self.has_begun = threading.Event()
        """Set after the first job has returned or failed."""
        self.is_feeding = False
        """True from the start until the last job, unless the first job has failed."""
        self._worker = Worker(RETRY_AFTER, label)
        self._num_dropped = 0
        self._said: set[str] = set()

    def start(self, begin: Job) -> None:
        """Start the thread with its first job. If this job fails, the thread ends."""
        self.is_feeding = True
        self._flushed_at = time.monotonic()
        self._worker.submit(LANE, partial(self._begin, begin), self._gives_up_all)

    def offer(self, job: Job) -> None:
        """Queue a record, or drop the record if the queue is full or the thread has ended."""
        if not self.is_feeding:
            return
        if len(self._worker.jobs(LANE)) >= MAX_WAITING:
            self._num_dropped += 1
            return
        self.put(job)
        if self._flush is not None and time.monotonic() - self._flushed_at >= INTERVAL:
            self._flushed_at = time.monotonic()
            self.put(self._flush)

    def put(self, job: Job) -> None:
        """Queue a job, even if the queue is full."""
        self._worker.submit(LANE, job, self._gives_up)

    def drain(self, limit: float) -> None:
        """Wait for the jobs in the queue, at most `limit` seconds."""
        self._worker.flush(LANE, limit)

    def end(self, job: Job, limit: float) -> None:
        """Queue the last job and wait for the end of the thread. Only the first call counts.

        Returns after `limit` seconds at the latest. Returns earlier if a job has failed with a `ConnectionError` and is
        still waiting after `STALL` seconds. A notice gives the number of jobs that were dropped or late.
        """
        if not self.is_feeding:
            return
        if self._flush is not None:
            self.put(self._flush)
        self.put(job)
        self._wait(limit)
        if not self.is_feeding:  # the first job has failed meanwhile
            return
        self.is_feeding = False
        self._worker.close()
        if num_left := len(self._worker.jobs(LANE)):
            self._say(f"the last {num_left} records and notes could not be written in time, and are missing")
        if self._num_dropped:
            self._say(f"too slow; {self._num_dropped} records were dropped. Log less often to keep all")

    def _wait(self, limit: float) -> None:
        deadline, before = time.monotonic() + limit, None
        while (jobs := self._worker.jobs(LANE)) and (left := deadline - time.monotonic()) > 0:
            if jobs[0] is before and before.num_failures:
                return
            before = jobs[0]
            self._worker.flush(LANE, min(left, STALL))

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            say(f"{self._label}: {text}")

    # ---- in the thread

    def _begin(self, begin: Job) -> None:
        begin()
        self.has_begun.set()

    def _gives_up_all(self, error: Exception, *_: object) -> bool:
        if gives_up := self._gives_up(error, loss="Nothing is recorded"):
            self.is_feeding = False
            self._worker.close()
            self.has_begun.set()
        return gives_up

    def _gives_up(self, error: Exception, *_: object, loss: str = "Such records are left out") -> bool:
        if isinstance(error, ConnectionError):
            self._say(f"{error}; what is logged waits for it, and the training goes on")
            return False
        self._say(f"{type(error).__name__}: {error}. {loss}. The training goes on.")
        return True


def knock(uri: str) -> None:
    """Open a connection to a tracker's server, since trackers themselves try for minutes before they give up.

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
    """Return an address without user name and password."""
    return re.sub(r"//[^/@]*@", "//", uri).rstrip("/")
