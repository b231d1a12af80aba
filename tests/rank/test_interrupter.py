"""A rank leaves an interrupted call at the collective that the driver names, and never in the middle of a message."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from flytekitplugins.daskpytorch.rank import calls as module
from flytekitplugins.daskpytorch.rank.calls import Interrupter


class Rank:
    """This thread as a rank, and another thread as the one that receives orders."""

    def __init__(self) -> None:
        self.count = 5
        self.link: Any = SimpleNamespace(is_sending=False)
        self.interrupter = Interrupter(self.link)
        self.answers: list[int] = []
        self.has_begun, self.has_halted = threading.Event(), threading.Event()

    def halt(self) -> None:
        self.answers.append(self.interrupter.halt(1))
        self.has_halted.set()

    def order(self, at: int) -> threading.Thread:
        """Have the call end after so many collectives, once this rank has said that it halts."""

        def follow() -> None:
            self.has_begun.wait()
            self.halt()
            self.interrupter.leave_at(at)

        thread = threading.Thread(target=follow)
        thread.start()
        return thread

    def run(self, step: Callable[[], object] = lambda: None) -> None:
        """A call that enters a collective with each step, for ever."""
        with self.interrupter.interruptible(1):
            self.has_begun.set()
            while True:
                step()
                if self.has_halted.is_set():
                    self.count += 1


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    handler, trace = signal.getsignal(signal.SIGINT), sys.gettrace()
    sys.settrace(None)
    made = Rank()
    monkeypatch.setattr(module, "newest_collective", lambda: made.count)
    monkeypatch.setattr(module.process_group, "num_collectives", lambda: made.count)
    yield made
    signal.signal(signal.SIGINT, handler)
    sys.settrace(trace)


@pytest.mark.parametrize("at", [5, 8])
def test_it_halts_and_then_leaves_after_as_many_collectives_as_the_driver_says(rank: Rank, at: int) -> None:
    thread = rank.order(at)
    with pytest.raises(KeyboardInterrupt):
        rank.run()
    thread.join()
    assert rank.answers == [5]
    assert rank.count == at


def test_a_call_that_has_yet_to_begin_leaves_at_its_begin(rank: Rank) -> None:
    rank.has_begun.set()
    rank.order(5).join()
    with pytest.raises(KeyboardInterrupt):
        rank.run()
    assert rank.count == 5


def test_it_is_not_interrupted_in_the_middle_of_a_message(rank: Rank) -> None:
    rank.link.is_sending = True
    thread = rank.order(5)
    ends: list[bool] = []

    def step() -> None:
        if rank.has_halted.is_set():
            ends.append(rank.link.is_sending)
            rank.link.is_sending = False

    with pytest.raises(KeyboardInterrupt):
        rank.run(step)
    thread.join()
    assert ends[0]


def test_outside_of_calls_nothing_happens(rank: Rank) -> None:
    with rank.interrupter.interruptible(1):
        rank.has_begun.set()
    rank.order(5).join()
    signal.raise_signal(signal.SIGINT)
    assert rank.answers == [5]


def test_an_interrupt_that_the_driver_has_not_ordered_is_the_calls_own(rank: Rank) -> None:
    """As `signal.raise_signal` of a user's code, or Ctrl-C at a debugger's prompt."""
    with rank.interrupter.interruptible(1):
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        rank.link.is_sending = True
        signal.raise_signal(signal.SIGINT)
        rank.link.is_sending = False
        with pytest.raises(KeyboardInterrupt):
            rank.run()
    assert rank.answers == []
