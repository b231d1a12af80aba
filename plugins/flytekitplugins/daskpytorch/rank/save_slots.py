"""Which sharded save is being written, and which waits: the same on all ranks, at the next save at the latest.

Each rank hears alone that a save is settled, and so some begin to write what waits before others do. When all meet
at the next save, they tell each other how far they are, and those behind catch up.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


@dataclass(frozen=True)
class View:
    """How far a rank is."""

    started: int
    """The number of the save that it has begun to write last; -1: of none."""
    is_settled: bool
    """That one has been committed or given up."""


class Save(Protocol):
    """What is put into the slots."""

    @property
    def number(self) -> int:
        """Its place among the attempt's saves."""

    def drop(self) -> None:
        """Called if it is never written."""


S = TypeVar("S", bound=Save)


class SaveSlots(Generic[S]):
    """One save in flight, and one that waits, in place of an older one that did."""

    def __init__(self, start: Callable[[S], None], forgotten: Callable[[S], None] = lambda _: None) -> None:
        self._start_writing = start
        self._forgotten = forgotten
        """Hears of one in whose place a newer one is put."""
        self._changed = threading.Condition()
        self._view = View(-1, is_settled=True)
        self._waiting: S | None = None
        self._num_unwritten = 0
        self._deferred: list[int] | None = None
        """What has been settled while all ranks meet: what they have told each other is to stay true until then."""

    @contextlib.contextmanager
    def placing(self) -> Iterator[View]:
        """Meet the other ranks, for a new save; how far this rank is, to tell them."""
        with self._changed:
            self._deferred = []
        try:
            yield self._view
        finally:
            with self._changed:
                deferred, self._deferred = self._deferred, None
                for number in deferred:
                    self._settle(number)

    def catch_up(self, views: Sequence[View]) -> None:
        """Be as far as the foremost rank; what waits here and has been begun nowhere is forgotten."""
        newest = max(view.started for view in views)
        with self._changed:
            waiting, self._waiting = self._waiting, None
            if waiting is not None and waiting.number <= newest:
                self._start(waiting)
            elif waiting is not None:
                waiting.drop()
                self._forgotten(waiting)
            # A rank that waits for nothing any more has been told that the save in flight is settled.
            self._view = View(newest, is_settled=any(view.is_settled for view in views if view.started == newest))

    def put(self, save: S) -> None:
        """Write it now, or when the one in flight is settled; on all ranks alike."""
        with self._changed:
            if self._view.is_settled:
                self._start(save)
            else:
                self._waiting = save

    def settle(self, number: int) -> None:
        """The driver has done with a save; of any but the one in flight that is no news."""
        with self._changed:
            if self._deferred is None:
                self._settle(number)
            else:
                self._deferred.append(number)

    def note_written(self) -> None:
        """A save that was begun has been written, or given up."""
        with self._changed:
            self._num_unwritten -= 1
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing will be settled any more: what waits will not be written."""
        with self._changed:
            self._waiting = None
            self._changed.notify_all()

    def flush(self, timeout: float | None) -> None:
        """Wait until all is written, or for `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_unwritten and self._waiting is None, timeout)

    def _settle(self, number: int) -> None:
        if number != self._view.started or self._view.is_settled:
            return
        self._view = View(number, is_settled=True)
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._start(waiting)

    def _start(self, save: S) -> None:
        self._view = View(save.number, is_settled=False)
        self._num_unwritten += 1
        self._start_writing(save)
