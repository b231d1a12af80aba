"""What runs in this process and must end when the task is told to."""

from __future__ import annotations

import weakref
from typing import Protocol

__all__ = ["Preemptible", "preempt_all", "running"]


class Preemptible(Protocol):
    """What runs in this process and must end when the task is told to."""

    def preempt(self, reason: str) -> None:
        """Save and end; called by a signal handler."""


running: weakref.WeakSet[Preemptible] = weakref.WeakSet()
"""Whatever is to hear of it."""


def preempt_all(reason: str) -> bool:
    """Have all gangs of this process save a checkpoint and end; whether there are any."""
    present = list(running)
    for preemptible in present:
        preemptible.preempt(reason)
    return bool(present)
