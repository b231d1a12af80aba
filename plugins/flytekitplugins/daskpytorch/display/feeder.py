"""Thread that feeds a tracker, so that a slow tracker never delays the training. Runs in the driver."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from flytekitplugins.daskpytorch.process.log import say
from flytekitplugins.daskpytorch.process.worker import Worker

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
