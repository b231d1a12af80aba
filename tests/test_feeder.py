"""The thread that feeds a tracker, with jobs that are slow or fail."""

from __future__ import annotations

import threading

import pytest

from flytekitplugins.daskpytorch.display import feeder as feeder_module
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


@pytest.mark.parametrize("has_flush", [True, False])
@pytest.mark.parametrize("is_down", [True, False])
def test_only_records_and_notes_count_as_missing(
    has_flush: bool, is_down: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(feeder_module, "STALL", 0.2)
    monkeypatch.setattr(feeder_module, "INTERVAL", 0.0)  # each record is followed by a flush

    def fail() -> None:
        raise ConnectionError("the server does not answer")

    def send() -> None:
        if is_down:
            fail()

    def take() -> None:
        """Stands for MLflow's, which only fills a batch."""

    feeder = Feeder("Tracker", send if has_flush else None)
    feeder.start(lambda: None)
    for _ in range(20):
        feeder.offer(take if has_flush else send)
    feeder.put(take)
    feeder.end(fail, 60.0)
    lost = (
        "the last 20 records and notes could not be written in time, and are missing"
        if is_down
        else "the run's end could not be recorded in time"
    )
    advice = "Check the address and the access to it. Records wait, and the training goes on."
    assert capsys.readouterr().err.splitlines() == [
        f"Tracker: the server does not answer. {advice}",
        f"Tracker: {lost}: check that its server or storage answers",
    ]
