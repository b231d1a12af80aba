"""Decides which sharded save is written and which one waits, alike on all ranks. Runs in a rank.

The driver tells each rank separately about a settled save, so some ranks begin the waiting save before others. At the
next save, all ranks exchange their progress, and the ranks behind catch up.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flytekitplugins.daskpytorch.rank.shard_plan import Staged


@dataclass(frozen=True)
class View:
    """A rank's progress in writing saves."""

    started: int
    """Number of the rank's last begun save. -1: no save."""
    is_settled: bool
    """True after the driver has committed that save or given it up."""


class SaveSlots:
    """Holds one save in flight and one waiting save. A newer save replaces the waiting one."""

    def __init__(self, start: Callable[[Staged], None], on_replaced: Callable[[Staged], None]) -> None:
        self._start_writing = start
        self._on_replaced = on_replaced
        """Called with a waiting save that a newer one replaces."""
        self._changed = threading.Condition()
        self._view = View(-1, is_settled=True)
        self._waiting: Staged | None = None
        self._num_unwritten = 0
        self._deferred: list[int] | None = None
        """Numbers of saves that were settled during `placing`. Until its end, the exchanged views have to stay true.
        None outside `placing`."""

    @contextlib.contextmanager
    def placing(self) -> Iterator[View]:
        """Hold this rank's progress unchanged while the ranks agree on a new save. Yields the progress."""
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
        """Advance to the foremost rank's save. A waiting save that no rank has begun is dropped."""
        newest = max(view.started for view in views)
        with self._changed:
            waiting, self._waiting = self._waiting, None
            if waiting is not None and waiting.number <= newest:
                self._start(waiting)
            elif waiting is not None:
                waiting.drop()
                self._on_replaced(waiting)
            # A rank with no waiting save left has learned that the save in flight is settled.
            self._view = View(newest, is_settled=any(view.is_settled for view in views if view.started == newest))

    def put(self, save: Staged) -> None:
        """Write a save now, or after the save in flight is settled. All ranks decide alike."""
        with self._changed:
            if self._view.is_settled:
                self._start(save)
            else:
                self._waiting = save

    def settle(self, number: int) -> None:
        """Record that the driver has committed a save or given it up. Ignored unless the save is in flight."""
        with self._changed:
            if self._deferred is None:
                self._settle(number)
            else:
                self._deferred.append(number)

    def note_written(self) -> None:
        """Record this rank's success or failure in writing a save."""
        with self._changed:
            self._num_unwritten -= 1
            self._changed.notify_all()

    def close(self) -> None:
        """Drop the waiting save, since the driver will settle no more saves."""
        with self._changed:
            self._waiting = None
            self._changed.notify_all()

    def flush(self, timeout: float | None) -> None:
        """Wait until all saves are written, or for `timeout` seconds. None: no limit."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_unwritten and self._waiting is None, timeout)

    def _settle(self, number: int) -> None:
        if number != self._view.started or self._view.is_settled:
            return
        self._view = View(number, is_settled=True)
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._start(waiting)

    def _start(self, save: Staged) -> None:
        self._view = View(save.number, is_settled=False)
        self._num_unwritten += 1
        self._start_writing(save)
