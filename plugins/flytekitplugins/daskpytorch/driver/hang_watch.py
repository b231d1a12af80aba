"""Hang detection for one attempt. Requests all ranks' stacks before declaring a hang. Runs in the driver."""

import math
from collections.abc import Callable, Mapping
from typing import Literal

from flytekitplugins.daskpytorch.driver.attempt import Attempt
from flytekitplugins.daskpytorch.driver.deadlock import DeadlockWatch
from flytekitplugins.daskpytorch.driver.hang_detector import RankState, next_look, report_hang, waits_of
from flytekitplugins.daskpytorch.protocol import messages, orders

ANSWER_TIME = 0.4
"""Timeout, in seconds, for the ranks to send their stacks before silent ranks get a signal."""
STACKS_WAIT = 1.5
"""Timeout, in seconds, for all ranks' stacks. Includes `ANSWER_TIME` and the time after the signal."""


class HangWatch:
    """Watch for hangs of one attempt."""

    def __init__(
        self,
        attempt: Attempt,
        timeout: float | Literal["auto"] | None,
        clock: Callable[[], float],
        is_committing: Callable[[], bool],
    ) -> None:
        """Begin to watch.

        Args:
            attempt: The attempt, with started ranks.
            timeout: Seconds without signs of life until the gang counts as hung. None turns off hang detection, but
                deadlock detection stays on.
            clock: Returns seconds, and never goes back.
            is_committing: Returns True while a sharded checkpoint is being committed. Commits suspend hang detection:
                before its last save, a finished rank may wait for the commit.
        """
        self._attempt = attempt
        self._timeout = timeout
        self._now = clock
        self._is_committing = is_committing
        self._signal_at = math.inf
        self._answers_until: float | None = None
        self._waits: Mapping[int, frozenset[tuple[str, int]]] | None = None
        """Collectives in which the ranks waited at the last look. None if a rank was working."""
        self._deadlocks = DeadlockWatch(attempt, clock, self._states)

    def is_hung(self) -> bool:
        """Return True if the attempt hangs or a deadlock is proven, and set `attempt.hang` then.

        Once the silence is too long, a first call requests all ranks' stacks. A later call decides: call again after
        each answer, and at `due`.
        """
        attempt = self._attempt
        if self._answers_until is None:
            if self._is_due():
                self._deadlocks.forget()
                self._ask()
                return False
            return not self._is_committing() and self._deadlocks.is_proven()
        if not attempt.have_answered(attempt.remembered):
            if self._now() >= self._signal_at:
                self._signal_silent()
            if self._now() < self._answers_until:
                return False
        self.stop_asking()
        attempt.hangs_at = 0.0  # ranks may have moved since
        if not self._is_due():
            return False
        states = self._states()
        if self._timeout == "auto" and not self._are_stuck(states):
            attempt.hangs_at = self._now() + next_look(states)
            return False
        attempt.hang = report_hang(states, self._timeout or "auto")
        attempt.tell(messages.Tell(orders.ShowStacks()))
        return True

    def stop_asking(self) -> None:
        """Ignore answers to the last request that arrive later."""
        self._answers_until = None

    @property
    def due(self) -> float | None:
        """Latest time for the next `is_hung` call, in seconds on the clock. None if no call is due."""
        if self._answers_until is not None:
            return min(self._signal_at, self._answers_until)
        moments = (self._hangs_at(), None if self._is_committing() else self._deadlocks.due)
        return min((moment for moment in moments if moment is not None), default=None)

    def _is_due(self) -> bool:
        hangs_at = self._hangs_at()
        return hangs_at is not None and self._now() >= hangs_at

    def _hangs_at(self) -> float | None:
        """Return the time from which a silent gang counts as hung, or with `auto` must send stacks.

        None while hang detection is suspended.
        """
        attempt = self._attempt
        if self._timeout is None or attempt.stillness is None or attempt.prompts.debugged or self._is_committing():
            return None
        if self._now() >= attempt.hangs_at:  # avoids a loop over all ranks
            attempt.hangs_at = attempt.stillness.hangs_at(attempt.running, self._timeout)
        return attempt.hangs_at

    def _are_stuck(self, states: Mapping[int, RankState]) -> bool:
        """Return True if all ranks still wait in the collectives of the previous look. Then no rank can continue."""
        before, self._waits = self._waits, waits_of(states)
        return self._waits is not None and self._waits == before

    def _ask(self) -> None:
        self._attempt.stacks.clear()
        self._attempt.located.clear()
        self._attempt.remembered.clear()
        self._attempt.tell(messages.Tell(orders.Locate()))
        self._signal_at, self._answers_until = self._now() + ANSWER_TIME, self._now() + STACKS_WAIT

    def _signal_silent(self) -> None:
        """Have agents signal all ranks without an answer. The signal makes ranks write their stacks."""
        self._signal_at = math.inf
        attempt = self._attempt
        for peer in attempt.carriers:
            if silent := [rank for rank in attempt.ranks_of[peer.node.worker] if rank not in attempt.located]:
                peer.send(messages.Dump(silent))

    def _states(self) -> dict[int, RankState]:
        attempt = self._attempt
        if attempt.stillness is None:
            return {}
        now, located = self._now(), attempt.located
        return {
            rank: RankState(
                is_done=rank in attempt.results,
                num_collectives=located[rank].num_collectives if rank in located else None,
                num_moves=located[rank].num_moves if rank in located else None,
                num_bytes=located[rank].num_bytes if rank in located else None,
                still_for=attempt.stillness.still_for(rank, now),
                stacks=located[rank].stacks if rank in located else attempt.stacks.get(rank, "it did not answer"),
                recalled=attempt.remembered.get(rank),
            )
            for rank in attempt.places
        }
