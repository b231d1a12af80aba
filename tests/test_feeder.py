"""The thread that feeds a tracker, with jobs that are slow or fail."""

from __future__ import annotations

import threading

import pytest

from flytekitplugins.daskpytorch.display.feeder import Feeder
from processes import until


def test_the_end_does_not_wait_for_a_run_that_could_not_be_opened(capsys: pytest.CaptureFixture[str]) -> None:
    may_fail, closed = threading.Event(), threading.Event()

    def begin() -> None:
        may_fail.wait(60)
        raise ValueError("no such project")

    feeder = Feeder("Tracker")
    feeder.start(begin)
    ending = threading.Thread(target=feeder.end, args=(closed.set, 120.0), daemon=True)
    ending.start()
    until(lambda: feeder._worker.is_urgent, "the end's wait")
    may_fail.set()
    ending.join(30)
    assert not ending.is_alive()
    assert not closed.is_set()
    assert capsys.readouterr().err == (
        "Tracker: ValueError: no such project. Nothing is recorded. The training goes on.\n"
    )
