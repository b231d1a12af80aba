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
    """Progress of a rank in writing sharded checkpoints."""

    started: int
    """Number of the newest `save_sharded` call whose write the rank has begun, from 0. -1: the rank has begun none."""
    is_settled: bool
    """True after the driver has committed save number `started` or given it up, and before the first save."""


class SaveSlots:
    """Holds at most two sharded saves of this rank: one in flight until its commit, and one that waits.

    A newer save replaces the waiting one.
    """

    def __init__(self, start: Callable[[Staged], None], on_replaced: Callable[[Staged], None]) -> None:
        self._start_writing = start
        self._on_replaced = on_replaced
        """Called with a waiting save that a newer save replaces."""
        self._changed = threading.Condition()
        self._view = View(-1, is_settled=True)
        self._waiting: Staged | None = None
        self._settled = -1
        """Number of the save that the driver has committed or given up last. -1: none."""
        self._is_placing = False
        """True in a `placing` block, in which the ranks exchange their progress. `_settled` then counts after it."""

    @contextlib.contextmanager
    def placing(self) -> Iterator[View]:
        """Yield this rank's progress, and keep it unchanged during a `with` block in which ranks exchange theirs."""
        with self._changed:
            self._is_placing = True
        try:
            yield self._view
        finally:
            with self._changed:
                self._is_placing = False
                self._heed_settled()

    def catch_up(self, views: Sequence[View]) -> None:
        """Begin the waiting save if another rank has begun it, else drop it, so that all ranks are at the same save.

        Args:
            views: Progress of all ranks.
        """
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
        """Begin to write a save, or let it wait until the driver has committed or given up the save in flight."""
        with self._changed:
            if self._view.is_settled:
                self._start(save)
            else:
                self._waiting = save

    def settle(self, number: int) -> None:
        """Record that the driver has committed or given up the save in flight, and begin the waiting save.

        Args:
            number: Number of the save. Ignored unless this save is in flight.
        """
        with self._changed:
            self._settled = number
            if not self._is_placing:
                self._heed_settled()

    def close(self) -> None:
        """Drop the waiting save, since the driver will commit no more saves."""
        with self._changed:
            self._waiting = None
            self._changed.notify_all()

    def flush(self, timeout: float | None) -> None:
        """Wait until no save waits, or for `timeout` seconds. None: no limit."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is None, timeout)

    def _heed_settled(self) -> None:
        if self._settled != self._view.started or self._view.is_settled:
            return
        self._view = View(self._settled, is_settled=True)
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._start(waiting)

    def _start(self, save: Staged) -> None:
        self._view = View(save.number, is_settled=False)
        self._changed.notify_all()
        self._start_writing(save)
