"""Threads for slow work, such as requests to storage, to trackers and to a GPU's driver.

The jobs of a worker run in order. While a failed job waits for its retry, the others wait, too.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

RETRY_AFTER = 2.0
"""Seconds before the first retry. Each further retry doubles the pause, up to `MAX_PAUSE`."""
MAX_PAUSE = 60.0
"""Seconds."""
IDLE_TIME = 1.0
"""Seconds without a job after which the thread ends."""
LOOK_INTERVAL = 1.0
"""Seconds between two signs of life of a rank that waits."""

_logger = logging.getLogger(__name__)
T = TypeVar("T")


def pause(seconds: float, moved: Callable[[], object]) -> None:
    """Sleep with signs of life: a rank that waits for storage does not hang."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        moved()
        time.sleep(min(left, LOOK_INTERVAL))


def with_retries(
    act: Callable[[], T],
    waits: Sequence[float],
    tell: Callable[[Exception], object] = lambda _: None,
    moved: Callable[[], object] = lambda: None,
    final: tuple[type[Exception], ...] = (FileNotFoundError,),
) -> T:
    """Call a function until it succeeds, with pauses (seconds), but raise a `final` error at once.

    `tell` gets the first error. `moved` is called while this waits.
    """
    for number, wait in enumerate(waits):
        try:
            return act()
        except final:
            raise
        except Exception as error:  # any error of a store's client
            if number == 0:
                tell(error)
            pause(wait, moved)
    return act()


def in_thread(act: Callable[[], T], name: str) -> Future[T]:
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(act())
        except BaseException as error:  # for the thread that waits for the result
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def _give_up(error: Exception, *_: float) -> bool:
    _logger.error("A job of the thread %s failed", threading.current_thread().name, exc_info=error)
    return True


@dataclass(eq=False, kw_only=True)
class QueuedJob:
    work: Callable[[], object]
    gives_up: Callable[[Exception, int, float], bool]
    """Gets the error, the number of failed tries, and the seconds until the retry. True ends the job."""
    due: float
    num_failures: int = 0


class Worker:
    def __init__(self, retry_after: float = RETRY_AFTER, name: str = "storage") -> None:
        self.retry_after = retry_after
        self._name = name
        self._changed = threading.Condition()
        self.jobs: deque[QueuedJob] = deque()
        self.has_begun = False
        """A job was added, at any time."""
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self.is_urgent = False

    def submit(self, work: Callable[[], object], gives_up: Callable[[Exception, int, float], bool] = _give_up) -> None:
        """Add a job, whose first error ends it by default. RuntimeError: no thread can start, and no job is added."""
        with self._changed:
            if self._thread is None:
                self._start()
            self.jobs.append(QueuedJob(work=work, gives_up=gives_up, due=time.monotonic()))
            self.has_begun = True
            self._changed.notify_all()

    def flush(self, timeout: float | None = None) -> bool:
        self.shorten_pauses()
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or not self.jobs, timeout)
            return not self.jobs

    def shorten_pauses(self) -> None:
        with self._changed:
            self.is_urgent = True
            soon = time.monotonic() + self.retry_after
            for job in self.jobs:
                job.due = min(job.due, soon)
            self._changed.notify_all()

    def close(self) -> None:
        """Start no further job. Queued jobs are never run."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def do(self, job: QueuedJob) -> None:
        """A failed job stays for a retry, unless its `gives_up` returns True."""
        try:
            job.work()
        except Exception as error:  # clients of storage and trackers raise errors of any class, and none may end a gang
            job.num_failures += 1
            doublings = 0 if self.is_urgent else job.num_failures - 1
            pause = min(MAX_PAUSE, self.retry_after * 2**doublings)
            if not job.gives_up(error, job.num_failures, pause):
                with self._changed:
                    job.due = time.monotonic() + pause
                return
        with self._changed:
            self.jobs.popleft()
            self._changed.notify_all()

    def _start(self) -> None:
        thread = threading.Thread(target=self._work, name=f"daskpytorch-{self._name}", daemon=True)
        thread.start()  # waits for the lock, until the job is added
        self._thread = thread

    def _work(self) -> None:
        while not self._is_closed:
            with self._changed:
                job = self.jobs[0] if self.jobs else None
                pause = IDLE_TIME if job is None else job.due - time.monotonic()
                if pause > 0.0:
                    if not self._changed.wait(pause) and not self.jobs:
                        self._thread = None
                        return
                    continue
            if job is not None:
                self.do(job)
