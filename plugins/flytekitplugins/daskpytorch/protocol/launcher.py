"""The interface of a host that can start agents: a Dask cluster, or the task's own node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from flytekitplugins.daskpytorch.protocol.messages import AgentOrder

__all__ = ["AgentLauncher", "OnFailure"]


OnFailure = Callable[[str, Exception], None]
"""Called with a worker and an error: its agent could not be started, or ended in an error."""


class AgentLauncher(Protocol):
    """Starts agents, one per worker, wherever those are."""

    workers: Sequence[str]
    """The workers to begin with, in the order of their ranks."""
    num_wanted: int
    """How many workers the gang is to have."""
    host: str
    """The address at which the workers can reach this process."""

    def launch(self, orders: Sequence[AgentOrder], on_failure: OnFailure) -> None:
        """Start agents."""

    def present(self) -> Sequence[str]:
        """All workers that are there now, these and others.

        Raises:
            OSError: Nobody answers that question.
        """

    def is_connected(self) -> bool:
        """Whether whoever knows the workers can be asked."""

    def close(self) -> None:
        """Forget the agents; they end with their connections."""
