"""An observer that fails, in the driver or in rank 0, is dropped. The others and the training go on."""

import functools
import logging
import threading
from collections.abc import Callable

import pytest

from flytekitplugins.daskpytorch.errors import StoppedEarlyError
from flytekitplugins.daskpytorch.protocol import journal
from flytekitplugins.daskpytorch.protocol.observer import Observer, Observers, RankObserver, RankObservers
from flytekitplugins.daskpytorch.records import LogRecord

RECORD = LogRecord(rank=0, step=1, num_steps=None, time=0.0, metrics={})


class Steady(Observer):
    """Remembers."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.notes: list[str] = []

    def on_log(self, record: LogRecord) -> None:
        self.steps.append(record.step)

    def on_note(self, text: str) -> None:
        self.notes.append(text)


class Broken(Steady):
    """Fails at the first record."""

    def on_log(self, record: LogRecord) -> None:
        super().on_log(record)
        raise OSError(28, "No space left on device")


class Choosy(Observer):
    """Wants no more after the first record."""

    def on_log(self, record: LogRecord) -> None:
        raise StoppedEarlyError("others are better", epoch=1, metric="loss", value=1.0)


def test_observer_that_fails_is_left_out_and_the_others_hear_of_it_once(caplog: pytest.LogCaptureFixture) -> None:
    broken, steady = Broken(), Steady()
    observers = Observers([broken, steady])
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            observers.tell(journal.Logged(record=RECORD))
    assert observers.stopped_early is None
    assert broken.steps == [1]
    assert steady.steps == [1, 1, 1]
    told = "Broken.on_event failed (OSError: [Errno 28] No space left on device) and is not called any more"
    assert steady.notes == [told]
    assert broken.notes == []
    [record] = caplog.records
    assert told in record.getMessage()
    assert record.exc_info is not None


def test_wish_to_end_the_gang_is_no_failure_and_keeps_nobody_from_hearing() -> None:
    choosy, steady = Choosy(), Steady()
    observers = Observers([choosy, steady])
    for _ in range(2):
        observers.tell(journal.Logged(record=RECORD))
        assert isinstance(observers.stopped_early, StoppedEarlyError)
    assert steady.steps == [1, 1]


# ---- In rank 0


class Part(RankObserver):
    """Remembers, or fails as it is told to."""

    def __init__(self, fails_to: str = "") -> None:
        self.heard: list[str] = []
        self.fails_to = fails_to
        self._do("open")

    def on_log(self, record: LogRecord) -> None:
        self._do("logged")

    def on_end(self, exit_code: int, stopped_early: str | None = None) -> None:
        self._do("close")

    def _do(self, what: str) -> None:
        self.heard.append(what)
        if what == self.fails_to:
            raise ValueError(what)


class Divided(Steady):
    """Has a part in rank 0."""

    def __init__(self, make: Callable[[], RankObserver] | None) -> None:
        super().__init__()
        self.make = make

    def for_rank(self) -> Callable[[], RankObserver] | None:
        if self.make is None:
            raise OSError("no part")
        return self.make


def heard_in_rank(*observers: Observer) -> list[list[str]]:
    in_rank = RankObservers()
    in_rank.open(Observers(observers).for_rank())
    parts = [part for part in in_rank._observers if isinstance(part, Part)]
    for _ in range(2):
        in_rank.call("on_log", RECORD)
    in_rank.call("on_end", 0, None)
    return [part.heard for part in parts]


def test_only_observers_that_have_a_part_in_rank_0_have_one() -> None:
    assert heard_in_rank(Steady()) == []
    assert heard_in_rank(Steady(), Divided(Part), Divided(Part)) == [["open", "logged", "logged", "close"]] * 2


@pytest.mark.parametrize(
    ("fails_to", "heard"),
    [("open", []), ("logged", [["open", "logged"]]), ("close", [["open", *["logged"] * 2, "close"]])],
)
def test_part_that_fails_is_left_out_and_the_other_goes_on(
    fails_to: str, heard: list[list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    whole = ["open", "logged", "logged", "close"]
    assert heard_in_rank(Divided(functools.partial(Part, fails_to)), Divided(Part)) == [*heard, whole]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"ValueError: {fails_to}" in caplog.text


def test_observer_whose_part_cannot_travel_is_left_out_here(caplog: pytest.LogCaptureFixture) -> None:
    lock, none, steady = Divided(functools.partial(Part, threading.Lock())), Divided(None), Steady()
    observers = Observers([lock, none, steady])
    assert observers.for_rank() == []
    observers.tell(journal.Logged(record=RECORD))
    assert (lock.steps, none.steps, steady.steps) == ([], [], [1])
    assert [note.partition(" (")[0] for note in steady.notes] == ["Divided.for_rank failed"] * 2
    assert "cannot be sent to the ranks" in steady.notes[0]
