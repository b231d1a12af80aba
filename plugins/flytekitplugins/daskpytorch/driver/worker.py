"""A gang's work with storage, in one thread: copies, commits and removals. Runs in the driver.

Each job belongs to a lane. The jobs of a lane are done in order; a job that fails is tried again after a pause, in
which its lane waits and the other lanes go on.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

RETRY_AFTER = 2.0
"""Seconds before a job that failed is tried again; doubled each time, up to ..."""
MAX_PAUSE = 60.0


@dataclass(eq=False, kw_only=True)
class Job:
    """Something to do."""

    lane: str
    work: Callable[[], object]
    gives_up: Callable[[Exception, int, float], bool]
    """Called with each error, the number of errors so far, and the seconds until the next try. True ends the job."""
    due: float
    """Earliest time of the next try, on the monotonic clock."""
    num_failures: int = 0


class Worker:
    """Does jobs, in a thread that starts with the first of them."""

    def __init__(self, retry_after: float = RETRY_AFTER) -> None:
        self._retry_after = retry_after
        self._changed = threading.Condition()
        self._jobs: list[Job] = []
        """In the order in which they were submitted."""
        self._thread: threading.Thread | None = None
        self._lanes: set[str] = set()
        self._is_closed = False
        self.is_urgent = False
        """True if a caller waits for the jobs: pauses stay short."""

    def submit(
        self, lane: str, work: Callable[[], object], gives_up: Callable[[Exception, int, float], bool] = lambda *_: True
    ) -> None:
        """Have this done once all earlier jobs of the lane are done."""
        with self._changed:
            self._lanes.add(lane)
            self._jobs.append(Job(lane=lane, work=work, gives_up=gives_up, due=time.monotonic()))
            self._changed.notify_all()
            if self._thread is None:
                self._start()

    def has_begun(self, lane: str) -> bool:
        """Return True if the lane has ever had a job."""
        return lane in self._lanes

    def flush(self, lane: str, timeout: float) -> bool:
        """Wait until all jobs of the lane are done, or for `timeout` seconds; return True if they are done."""
        self.hurry()
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or not self._has_jobs(lane), timeout)
            return not self._has_jobs(lane)

    def hurry(self) -> None:
        """Keep pauses short from now on."""
        with self._changed:
            self.is_urgent = True
            soon = time.monotonic() + self._retry_after
            for job in self._jobs:
                job.due = min(job.due, soon)
            self._changed.notify_all()

    def close(self) -> None:
        """Start no other job."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def first(self) -> Job | None:
        """Return the job that is due first, of those that no earlier job of their lane holds up."""
        heads = {job.lane: job for job in reversed(self._jobs)}.values()
        return min(heads, key=lambda job: job.due, default=None)

    def do(self, job: Job) -> None:
        """Try a job."""
        try:
            job.work()
        except Exception as error:  # whatever a store's client raises: the training goes on without it
            job.num_failures += 1
            doublings = 0 if self.is_urgent else job.num_failures - 1
            pause = min(MAX_PAUSE, self._retry_after * 2**doublings)
            if not job.gives_up(error, job.num_failures, pause):
                with self._changed:
                    job.due = time.monotonic() + pause
                return
        with self._changed:
            self._jobs.remove(job)
            self._changed.notify_all()

    def _has_jobs(self, lane: str) -> bool:
        return any(job.lane == lane for job in self._jobs)

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._work, name="daskpytorch-storage", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._is_closed:
            with self._changed:
                job = self.first()
                pause = None if job is None else job.due - time.monotonic()
                if pause is None or pause > 0.0:
                    self._changed.wait(pause)
                    continue
            if job is not None:
                self.do(job)
