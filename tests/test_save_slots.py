"""One save is in flight and one waits, in whatever order ranks learn that a save is settled."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from flytekitplugins.daskpytorch.rank.sharded import SaveSlots


@dataclass
class Save:
    number: int
    dropped: list[int]

    def drop(self) -> None:
        self.dropped.append(self.number)


@dataclass
class Rank:
    """A rank that writes in no time at all, and what it has begun to write."""

    started: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    inbox: list[int] = field(default_factory=list)
    """Settled by the driver, and not heard yet."""
    forgotten: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slots: SaveSlots = SaveSlots(self._start, lambda save: self.forgotten.append(save.number))

    def _start(self, save: Save) -> None:
        self.started.append(save.number)

    def hear(self) -> None:
        self.slots.settle(self.inbox.pop(0))


@dataclass
class Gang:
    """Ranks and a driver, which settles a save once all have begun it."""

    ranks: list[Rank]
    num_saves: int = 0
    settled: list[int] = field(default_factory=list)

    def save(self) -> None:
        with self.meeting():
            pass

    @contextlib.contextmanager
    def meeting(self) -> Iterator[None]:
        """All ranks exchange their progress, before the block, and place the next save, after it."""
        with contextlib.ExitStack() as stack:
            views = [stack.enter_context(rank.slots.placing()) for rank in self.ranks]
            yield
            for rank in self.ranks:
                rank.slots.catch_up(views)
                rank.slots.put(Save(self.num_saves, rank.dropped))
        self.num_saves += 1

    def can_settle(self) -> int | None:
        begun = set.intersection(*(set(rank.started) for rank in self.ranks)) - set(self.settled)
        return min(begun, default=None)

    def settle(self) -> None:
        number = self.can_settle()
        assert number is not None
        self.settled.append(number)
        for rank in self.ranks:
            rank.inbox.append(number)

    def finish(self) -> None:
        """Until nothing happens any more."""
        while self.can_settle() is not None or any(rank.inbox for rank in self.ranks):
            for rank in self.ranks:
                while rank.inbox:
                    rank.hear()
            if self.can_settle() is not None:
                self.settle()


def possible(gang: Gang) -> list[str | int]:
    """What can happen next: a save, the driver's settling of one, a rank's hearing of it."""
    settle = ["settle"] if gang.can_settle() is not None else []
    return ["save", *settle, *(number for number, rank in enumerate(gang.ranks) if rank.inbox)]


def play(events: list[str | int]) -> Gang:
    gang = Gang([Rank(), Rank()])
    for event in events:
        if event == "save":
            gang.save()
        elif event == "settle":
            gang.settle()
        else:
            gang.ranks[event].hear()
        begun = {number for rank in gang.ranks for number in rank.started}
        assert len(begun - set(gang.settled)) <= 1, events  # never are two in flight
    return gang


def orders(num_events: int) -> list[list[str | int]]:
    """All that can happen, in each order in which it can."""
    if num_events == 0:
        return [[]]
    return [[*before, event] for before in orders(num_events - 1) for event in possible(play(before))]


def test_in_every_order_all_ranks_write_the_same_saves_and_the_newest_is_one_of_them() -> None:
    num_played = 0
    for events in orders(9):
        gang = play(events)
        gang.finish()
        first, second = gang.ranks
        assert first.started == second.started == gang.settled, events
        assert first.started == sorted(set(first.started)), events
        assert first.started[-1] == gang.num_saves - 1, events
        assert sorted(first.started + first.dropped) == list(range(gang.num_saves)), events
        assert first.forgotten == second.forgotten == first.dropped, events
        num_played += 1
    assert num_played > 1000


@pytest.mark.parametrize("newest", [1, 2])
def test_what_is_settled_while_the_ranks_meet_counts_when_they_have_met(newest: int) -> None:
    gang = Gang([Rank(), Rank()])
    for _ in range(newest):  # of two, the second waits
        gang.save()
    gang.settle()
    with gang.meeting():
        gang.ranks[0].hear()  # after it has told the others that its save is in flight
        assert [rank.started for rank in gang.ranks] == [[0], [0]]
    assert [rank.started for rank in gang.ranks] == [[0, newest], [0]]
    gang.finish()
    assert [rank.started for rank in gang.ranks] == [[0, newest]] * 2
    assert [rank.dropped for rank in gang.ranks] == [[*range(1, newest)]] * 2


def test_a_meeting_that_fails_leaves_what_waits_waiting() -> None:
    rank = Rank()
    gang = Gang([rank])
    gang.save()
    gang.save()
    with pytest.raises(ValueError, match="they save"), rank.slots.placing():
        raise ValueError("they save different steps")
    rank.slots.settle(0)
    assert rank.started == [0, 1]


def test_flush_waits_for_what_waits() -> None:
    rank = Rank()
    gang = Gang([rank])
    gang.save()
    gang.save()
    flushed = threading.Event()
    flushing = threading.Thread(target=lambda: (rank.slots.flush(None), flushed.set()))
    flushing.start()
    assert not flushed.wait(0.05)
    rank.slots.settle(0)
    flushing.join(30.0)
    assert flushed.is_set()


def test_what_waits_is_given_up_once_nobody_will_say_that_its_turn_has_come() -> None:
    rank = Rank()
    gang = Gang([rank])
    gang.save()
    gang.save()
    rank.slots.close()
    rank.slots.flush(None)
    assert rank.started == [0]
