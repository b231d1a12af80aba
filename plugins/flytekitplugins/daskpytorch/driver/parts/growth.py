"""Restarts a gang that lacks workers once more have come, right after a checkpoint. Runs in the driver."""

import contextlib

from flytekitplugins.daskpytorch.driver.attempt import Attempt
from flytekitplugins.daskpytorch.driver.part import Part
from flytekitplugins.daskpytorch.driver.state import GangState
from flytekitplugins.daskpytorch.protocol.checkpoint_file import CheckpointFile
from flytekitplugins.daskpytorch.protocol.sharded import ShardedCheckpoint

GROWS = "more workers have come"
"""Reason for a restart that adds workers. All other reasons are failures."""


class Growth(Part):
    """Ends an attempt on too few workers, so that the next one begins with more. A gang that stays does not grow."""

    _has_kept = False
    """True if a checkpoint was kept since the last `orders`."""
    _is_fresh = False
    """True if a checkpoint was kept right before the present decision, so that a restart loses no steps."""
    _is_growing = False

    def __init__(self, state: GangState) -> None:
        self._state = state

    def begin(self, attempt: Attempt) -> None:
        """Forget the checkpoints of earlier attempts."""
        self._has_kept = self._is_fresh = self._is_growing = False

    def note_kept(self, entry: CheckpointFile | ShardedCheckpoint) -> None:
        """Record that a restart loses no steps now."""
        self._has_kept = True

    def orders(self, now: float) -> None:
        """Forget a checkpoint after one decision."""
        self._is_fresh, self._has_kept = self._has_kept, False

    def ends(self, attempt: Attempt) -> bool | None:
        """Look for workers while the attempt lacks some. Return True once a restart would add workers."""
        agents = self._state.agents
        if len(attempt.ranks_of) >= agents.num_wanted or self._state.request.stays:
            return None
        self._is_growing = self._is_fresh and not attempt.results and agents.can_grow(attempt.ranks_of)
        with contextlib.suppress(ConnectionError):  # the workers leave by themselves after their scheduler
            agents.recruit()
        return self._is_growing or None

    def reason(self, attempt: Attempt) -> str | None:
        """Return the reason for a restart that adds workers."""
        return GROWS if self._is_growing and not attempt.has_independent_failure else None
