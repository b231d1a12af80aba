"""Watches one attempt for hangs, and asks all ranks before it declares one. Runs in the driver."""

import math
from collections.abc import Callable, Mapping
from typing import Literal

from flytekitplugins.daskpytorch.driver.attempt import Attempt
from flytekitplugins.daskpytorch.driver.hang_detector import (
    LEAST_TIMEOUT,
    RankState,
    next_look,
    report_hang,
    waits_of,
)
from flytekitplugins.daskpytorch.protocol import messages, orders

ANSWER_TIME = 0.4
"""Timeout, in seconds, for ranks that may hang to report their stacks. Then silent ranks get a signal."""
STACKS_WAIT = 1.5
"""Seconds that ranks which may hang have to send their stacks. After `ANSWER_TIME` of these seconds, ranks without an
answer get a signal that makes them write their stacks."""
LEFT_TIMEOUT, LEFT_PAUSE = 20.0, 5.0
"""Minimum hang timeout with `hang_timeout="auto"`, and pause between two requests for stacks, in seconds, after a
staying gang's call has failed in a rank."""


class HangWatch:
    """Watches one attempt for hangs.

    After the hang timeout, the driver requests all ranks' stacks and collectives. The answers decide whether the gang
    hangs.
    """

    def __init__(
        self,
        attempt: Attempt,
        timeout: float | Literal["auto"] | None,
        clock: Callable[[], float],
        is_slow: Callable[[], bool],
    ) -> None:
        """Begin to watch.

        Args:
            attempt: The attempt, with started ranks.
            timeout: Seconds without signs of life until the gang counts as hung. None: the gang never counts as hung.
            clock: Returns seconds, and never goes back.
            is_slow: Returns True while a sharded checkpoint is being committed, or ranks wait for evaluations. Both
                suspend hang detection: before its last save, a finished rank may wait for the commit.
        """
        self._attempt = attempt
        self._timeout = timeout
        self._now = clock
        self._is_slow = is_slow
        self._signal_at = self._answers_until = math.inf
        """Times to signal silent ranks, and to stop waiting for the stacks. Infinite without a request for stacks."""
        self._waits: Mapping[int, frozenset[tuple[str, int]]] | None = None
        """Collectives in which each rank waited when the last hang was suspected. None if a rank was working."""

    def is_hung(self) -> bool:
        """Return True if the attempt hangs, and set `attempt.hang` then.

        A first call requests all ranks' stacks. A later call decides: call again after each answer, and at `due`.
        """
        if self._answers_until == math.inf:
            if not self._is_due():
                return False
            self._look()
        return self._has_looked() and self._is_confirmed()

    def stop_looking(self) -> None:
        """Ignore answers to the last request for stacks that arrive from now on."""
        self._signal_at = self._answers_until = math.inf

    @property
    def due(self) -> float | None:
        """Latest time for the next `is_hung` call, in seconds on the clock. None if no call is due."""
        if self._answers_until < math.inf:
            return min(self._signal_at, self._answers_until)
        return self._hangs_at()

    def _is_due(self) -> bool:
        hangs_at = self._hangs_at()
        return hangs_at is not None and self._now() >= hangs_at

    def _hangs_at(self) -> float | None:
        """Return the time from which a silent gang counts as hung, or with `auto` is asked for its stacks.

        None while hang detection is suspended.
        """
        attempt = self._attempt
        if self._timeout is None or attempt.stillness is None or attempt.prompts.debugged or self._is_slow():
            return None
        if self._now() >= attempt.hangs_at:  # avoids a loop over all ranks
            least = LEFT_TIMEOUT if attempt.call_failures else LEAST_TIMEOUT
            attempt.hangs_at = attempt.stillness.hangs_at(attempt.running, self._timeout, least)
        return attempt.hangs_at

    def _look(self) -> None:
        self._attempt.stacks.clear()
        self._attempt.locate()
        self._signal_at, self._answers_until = self._now() + ANSWER_TIME, self._now() + STACKS_WAIT

    def _has_looked(self) -> bool:
        """Return True if all ranks have sent their stacks, or the timeout has passed. Signals silent ranks."""
        attempt = self._attempt
        if attempt.have_answered(attempt.located) and attempt.have_answered(attempt.remembered):
            return True
        if self._now() >= self._signal_at:
            self._signal_silent()
        return self._now() >= self._answers_until

    def _signal_silent(self) -> None:
        """Have agents signal all ranks without an answer. The signal makes ranks write their stacks."""
        self._signal_at = math.inf
        attempt = self._attempt
        for peer in attempt.carriers:
            if silent := [rank for rank in attempt.ranks_of[peer.node.worker] if rank not in attempt.located]:
                peer.send(messages.Dump(silent))

    def _is_confirmed(self) -> bool:
        """Return True if the ranks' answers show a hang."""
        attempt, states = self._attempt, self._states()
        self.stop_looking()
        attempt.hangs_at = 0.0  # ranks may have moved since
        if not self._is_due():
            return False
        if self._timeout == "auto" and not self._are_stuck(states):
            attempt.hangs_at = self._now() + (LEFT_PAUSE if attempt.call_failures else next_look(states))
            return False
        attempt.hang = report_hang(states, self._timeout or "auto")
        attempt.tell(messages.Tell(orders.ShowStacks()))
        return True

    def _are_stuck(self, states: Mapping[int, RankState]) -> bool:
        """Return True if all ranks wait in the same collectives as in the previous answers.

        Then no rank can continue.
        """
        before, self._waits = self._waits, waits_of(states)
        return self._waits is not None and self._waits == before

    def _states(self) -> dict[int, RankState]:
        attempt = self._attempt
        if attempt.stillness is None:
            return {}
        now, located = self._now(), attempt.located
        return {
            rank: RankState(
                is_done=rank in attempt.results or rank in attempt.at_rest,
                num_collectives=located[rank].num_collectives if rank in located else None,
                still_for=attempt.stillness.still_for(rank, now),
                stacks=located[rank].stacks if rank in located else attempt.stacks.get(rank, "it did not answer"),
                recalled=attempt.remembered.get(rank),
            )
            for rank in attempt.places
        }
