"""Those who watch a gang: one that fails is left out, and the others and the training go on."""

from __future__ import annotations

import logging

import pytest

from flytekitplugins.daskpytorch.context import LogRecord
from flytekitplugins.daskpytorch.driver.observers import Observers
from flytekitplugins.daskpytorch.errors import StoppedEarlyError
from flytekitplugins.daskpytorch.protocol.observer import Observer

RECORD = LogRecord(rank=0, step=1, num_steps=None, time=0.0, metrics={})


class Steady(Observer):
    """Remembers."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.notes: list[str] = []

    def logged(self, record: LogRecord) -> None:
        self.steps.append(record.step)

    def noted(self, text: str) -> None:
        self.notes.append(text)


class Broken(Steady):
    """Fails at the first record."""

    def logged(self, record: LogRecord) -> None:
        super().logged(record)
        raise OSError(28, "No space left on device")


class Choosy(Observer):
    """Wants no more after the first record."""

    def logged(self, record: LogRecord) -> None:
        raise StoppedEarlyError("others are better", epoch=1, metric="loss", value=1.0)


def test_observer_that_fails_is_left_out_and_the_others_hear_of_it_once(caplog: pytest.LogCaptureFixture) -> None:
    broken, steady = Broken(), Steady()
    observers = Observers([broken, steady])
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert observers.tell("logged", RECORD) is None
    assert broken.steps == [1]
    assert steady.steps == [1, 1, 1]
    told = "Broken.logged failed (OSError: [Errno 28] No space left on device) and is not called any more"
    assert steady.notes == [told]
    assert broken.notes == []
    [record] = caplog.records
    assert told in record.getMessage()
    assert record.exc_info is not None


def test_all_observers_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    observers = Observers([Broken(), Broken()])
    observers.tell("logged", RECORD)
    observers.tell("logged", RECORD)
    assert len(caplog.records) == 2


def test_wish_to_end_the_gang_is_no_failure_and_keeps_nobody_from_hearing() -> None:
    choosy, steady = Choosy(), Steady()
    observers = Observers([choosy, steady])
    for _ in range(2):
        wish = observers.tell("logged", RECORD)
        assert isinstance(wish, StoppedEarlyError)
    assert steady.steps == [1, 1]
