"""How long each part of a gang's end may take: all follows from `Gang.grace_period`. Runs in the driver."""

__all__ = ["Deadlines"]


class Deadlines:
    """Seconds for each part of an end; one told by SIGTERM takes at most one and a half times the grace period.

    SIGTERM ── `grace_period` ──▶ ranks have stopped ── `storage` ──▶ their checkpoint is stored ── `results` ──▶ end
    """

    def __init__(self, grace_period: float) -> None:
        self.grace_period = grace_period
        """For the ranks to stop by themselves, at a call of `should_stop`."""
        self.unheeded = grace_period / 4
        """The same where no rank has ever called it."""
        self.storage = grace_period * 0.35
        """For the newest checkpoint to reach Flyte's storage."""
        self.results = grace_period / 10
        """For what the ranks have submitted to reach it."""
        self.stop = min(0.5, grace_period / 40)
        """For a rank to end once it is told to, before it is killed."""
        self.close = grace_period / 2
        """The same for rank 0, where it has observers that have something to close."""
        self.reopen = grace_period / 20
        """The same where the next attempt opens again what they close."""
        self.all_stopped = grace_period * 0.75
        """For word that all ranks have ended, after which a node counts as lost; more than any of them gets."""
        self.upload = grace_period / 2
        """For a checkpoint that is on its way to the driver when the last attempt ends."""
        self.dismiss = grace_period / 4
        """For the agents to clean up after the last rank."""
