"""Watch for hangs and deadlocks of one attempt, which asks all ranks before it declares either. Runs in the driver."""

import math
from collections.abc import Callable, Mapping
from typing import Literal

from flytekitplugins.daskpytorch.driver.attempt import Attempt
from flytekitplugins.daskpytorch.driver.hang_detector import (
    LEAST_TIMEOUT,
    Look,
    RankState,
    look_at,
    next_look,
    prove,
    report_deadlock,
    report_hang,
    waits_of,
)
from flytekitplugins.daskpytorch.protocol import messages, orders

ANSWER_TIME = 0.4
"""Timeout, in seconds, for ranks that may hang to report their stacks. Then silent ranks get a signal."""
STACKS_WAIT = 1.5
"""Seconds that ranks which may hang have to send their stacks. After `ANSWER_TIME` of these seconds, ranks without an
answer get a signal that makes them write their stacks."""
LOOK_INTERVAL = 3.0
"""Seconds between two requests for the stacks of ranks that stand still. The answers to two requests may prove a
deadlock."""
MAX_INTERVAL = 30.0
"""Maximum number of seconds between two requests for the stacks of ranks that stand still. The pause grows while the
stacks show ranks at work, as in steps of several minutes."""

LEFT_TIMEOUT = 20.0
"""Minimum hang timeout with `hang_timeout="auto"`, in seconds, after a staying gang's call has failed in a rank."""


class HangWatch:
    """Watches one attempt for hangs and deadlocks. Requests all ranks' stacks and collectives in two cases.

    - The ranks have been silent for the hang timeout. The answers decide whether the gang hangs.
    - All running ranks enter no collective and give no sign of life. The answers to two requests may prove a deadlock.
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
            timeout: Seconds without signs of life until the gang counts as hung. None turns off hang detection, but
                deadlock detection stays on.
            clock: Returns seconds, and never goes back.
            is_slow: Returns True while a sharded checkpoint is being committed, or ranks wait for evaluations. Both
                suspend hang detection: before its last save, a finished rank may wait for the commit.
        """
        self._attempt = attempt
        self._timeout = timeout
        self._now = clock
        self._is_slow = is_slow
        self._is_looking = False
        """True while ranks have yet to answer the newest request for their stacks."""
        self._signal_at = self._answers_until = math.inf
        """Times to signal silent ranks, and to stop waiting for the stacks, if the gang may hang. Infinite
        otherwise."""
        self._waits: Mapping[int, frozenset[tuple[str, int]]] | None = None
        """Collectives in which each rank waited when the last hang was suspected. None if a rank was working."""
        self._before: Look | None = None
        """Snapshot of the ranks at the last search for a deadlock. None if a rank was working."""
        self._num_vain = 0
        """Number of searches for a deadlock that have found a rank at work since all ranks stand still."""
        self._look_at = 0.0

    def is_hung(self) -> bool:
        """Return True if the attempt hangs or a deadlock is proven, and set `attempt.hang` then.

        A first call requests all ranks' stacks. A later call decides: call again after each answer, and at `due`.
        """
        is_due, all_stand = self._is_due(), self._all_stand()
        if not all_stand:
            self._before, self._num_vain = None, 0
        if not self._is_looking:
            if is_due or (all_stand and self._now() >= self._look_at):
                self._look()
        elif not all_stand and self._answers_until == math.inf:
            self.stop_looking()
        if not self._is_looking:
            return False
        if is_due and self._answers_until == math.inf:
            self._signal_at, self._answers_until = self._now() + ANSWER_TIME, self._now() + STACKS_WAIT
        return self._has_looked() and self._is_proven()

    def stop_looking(self) -> None:
        """Ignore answers to the last request for stacks that arrive from now on."""
        self._is_looking = False
        self._signal_at = self._answers_until = math.inf

    @property
    def due(self) -> float | None:
        """Latest time for the next `is_hung` call, in seconds on the clock. None if no call is due."""
        if self._answers_until < math.inf:
            return min(self._signal_at, self._answers_until)
        moments = (self._hangs_at(), self._look_at if self._all_stand() and not self._is_looking else None)
        return min((moment for moment in moments if moment is not None), default=None)

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

    def _all_stand(self) -> bool:
        """Return True if all running ranks stand still, and might wait for each other."""
        attempt = self._attempt
        if not attempt.standing or not attempt.is_formed or attempt.world_size == 1:
            return False
        if attempt.prompts.debugged or self._is_slow():
            return False
        num_ended = len(attempt.results) + len(attempt.failures) + len(attempt.exits) + len(attempt.at_rest)
        if attempt.has_delivered or len(attempt.standing) + num_ended < attempt.world_size:
            return False  # without a loop over all ranks for each event
        running = attempt.running
        return bool(running) and attempt.standing.issuperset(running)

    def _look(self) -> None:
        self._attempt.stacks.clear()
        self._attempt.locate()
        self._is_looking = True

    def _has_looked(self) -> bool:
        """Return True if all ranks have sent their stacks, or the timeout has passed.

        Signals silent ranks that may hang.
        """
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

    def _is_proven(self) -> bool:
        """Return True if the ranks' answers show a hang, or prove a deadlock together with the previous answers."""
        attempt, states = self._attempt, self._states()
        if self._answers_until < math.inf:
            self._judge_silence(states)
        else:
            self._compare_with_last(states)
        self.stop_looking()
        if attempt.hang is None:
            return False
        attempt.tell(messages.Tell(orders.ShowStacks()))
        return True

    def _judge_silence(self, states: Mapping[int, RankState]) -> None:
        attempt, self._before = self._attempt, None
        self._look_at = self._now() + LOOK_INTERVAL
        attempt.hangs_at = 0.0  # ranks may have moved since
        if not self._is_due():
            return
        if self._timeout != "auto" or self._are_stuck(states):
            attempt.hang = report_hang(states, self._timeout or "auto")
        else:
            attempt.hangs_at = self._now() + next_look(states)

    def _are_stuck(self, states: Mapping[int, RankState]) -> bool:
        """Return True if all ranks wait in the same collectives as in the previous answers.

        Then no rank can continue.
        """
        before, self._waits = self._waits, waits_of(states)
        return self._waits is not None and self._waits == before

    def _compare_with_last(self, states: Mapping[int, RankState]) -> None:
        before, self._before = self._before, look_at(states)
        self._num_vain = 0 if self._before is not None else self._num_vain + 1
        self._look_at = self._now() + min(LOOK_INTERVAL * max(1, self._num_vain), MAX_INTERVAL)
        if (difference := prove(before, self._before, states)) is not None:
            self._attempt.hang, self._attempt.is_deadlock = report_deadlock(states, difference), True

    def _states(self) -> dict[int, RankState]:
        attempt = self._attempt
        if attempt.stillness is None:
            return {}
        now, located = self._now(), attempt.located
        return {
            rank: RankState(
                is_done=rank in attempt.results or rank in attempt.at_rest,
                num_collectives=located[rank].num_collectives if rank in located else None,
                num_moves=located[rank].num_moves if rank in located else None,
                num_bytes=located[rank].num_bytes if rank in located else None,
                still_for=attempt.stillness.still_for(rank, now),
                stacks=located[rank].stacks if rank in located else attempt.stacks.get(rank, "it did not answer"),
                recalled=attempt.remembered.get(rank),
            )
            for rank in attempt.places
        }
