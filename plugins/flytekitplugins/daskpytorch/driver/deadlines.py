"""How long each part of a gang's end may take: all follows from `Gang.grace_period`. Runs in the driver."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Deadlines"]


@dataclass(frozen=True)
class Deadlines:
    """Seconds for each part of an end; one told by SIGTERM takes at most one and a half times the grace period.

    SIGTERM ── `grace_period` ──▶ ranks have stopped ── `storage` ──▶ their checkpoint is stored ── `results` ──▶ end
    """

    grace_period: float
    """For the ranks to stop by themselves, at a call of `should_stop`."""

    @property
    def unheeded(self) -> float:
        """The same where no rank has ever called it."""
        return self.grace_period / 4

    @property
    def storage(self) -> float:
        """For the newest checkpoint to reach Flyte's storage."""
        return self.grace_period * 0.35

    @property
    def results(self) -> float:
        """For what the ranks have submitted to reach it."""
        return self.grace_period / 10

    @property
    def stop(self) -> float:
        """For a rank to end once it is told to, before it is killed."""
        return min(0.5, self.grace_period / 40)

    @property
    def close(self) -> float:
        """The same for rank 0, where it has observers that have something to close."""
        return self.grace_period / 2

    @property
    def reopen(self) -> float:
        """The same where the next attempt opens again what they close."""
        return self.grace_period / 20

    @property
    def all_stopped(self) -> float:
        """For word that all ranks have ended, after which a node counts as lost; more than any of them gets."""
        return self.grace_period * 0.75

    @property
    def upload(self) -> float:
        """For a checkpoint that is on its way to the driver when the last attempt ends."""
        return self.grace_period / 2

    @property
    def dismiss(self) -> float:
        """For the agents to clean up after the last rank."""
        return self.grace_period / 4
