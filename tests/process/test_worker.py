"""The driver's storage worker does jobs in the right order, and repeats failed ones."""

import threading
import time
from collections.abc import Iterator

import pytest

from flytekitplugins.daskpytorch.process.worker import Worker, with_retries
from processes import until

PATIENCE = 300.0
"""Seconds that nothing here takes."""


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker(retry_after=0.02)
    yield made
    made.close()


def test_jobs_wait_in_order_for_one_that_fails(worker: Worker) -> None:
    done: list[str] = []
    is_up = threading.Event()

    def fail_at_first() -> None:
        if not is_up.is_set():
            raise OSError("down")
        done.append("first")

    worker.submit(fail_at_first, lambda *_: False)
    worker.submit(lambda: done.append("second"))
    assert not worker.flush(0.1)
    assert done == []
    is_up.set()
    assert worker.flush(PATIENCE)
    assert done == ["first", "second"]


def test_pauses_double_until_somebody_waits_and_the_job_may_be_given_up(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    def fail() -> None:
        raise OSError("down")

    def gives_up(error: Exception, num_failures: int, pause: float) -> bool:
        assert str(error) == "down"
        pauses.append(pause)
        return num_failures == 5

    monkeypatch.setattr(worker, "_start", lambda: None)  # the test does its job
    worker.submit(fail, gives_up)
    for number in range(5):
        if number == 3:
            assert not worker.flush(0.0)
        worker.do(worker.jobs[0])
    assert pauses == [0.02, 0.04, 0.08, 0.02, 0.02]
    assert not worker.jobs


def test_tries_are_as_far_apart_as_asked(worker: Worker) -> None:
    """Storage that is away for a moment costs no checkpoint."""
    tried: list[float] = []

    def fail() -> None:
        tried.append(time.monotonic())
        raise OSError("down")

    worker.submit(fail, lambda _, num_failures, __: num_failures == 3)
    until(lambda: not worker.jobs, "three failures")
    with pytest.raises(OSError, match="down"):
        with_retries(fail, (0.02, 0.04))
    first, second, third, *others = tried
    for one, two, three in ((first, second, third), others):
        assert two - one >= 0.02
        assert three - two >= 0.04


def test_closing_ends_the_thread_and_all_waiting_though_jobs_are_left(worker: Worker) -> None:
    before = set(threading.enumerate())
    assert worker.flush(0.0)
    assert set(threading.enumerate()) <= before  # most gangs store nothing
    slow = Worker(retry_after=PATIENCE)
    tried = threading.Event()

    def fail() -> None:
        tried.set()
        raise OSError("down")

    slow.submit(fail, lambda *_: False)
    assert tried.wait(PATIENCE)
    [thread] = set(threading.enumerate()) - before
    waiting = threading.Timer(0.1, slow.close)
    waiting.start()
    assert not slow.flush(PATIENCE)
    thread.join(PATIENCE)
    assert not thread.is_alive()
