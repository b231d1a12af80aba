"""Assignment of a cluster's workers to gangs, and the launcher of a gang on its share. Runs in the driver.

A gang gets all its workers or none, and larger gangs go first. The workers of an ended gang are enough for the next
gang of the same size. Large gangs therefore never starve, although small gangs fill every gap.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from flytekitplugins.daskpytorch.dask.agents import DaskAgents
from flytekitplugins.daskpytorch.protocol.placement import worker_order


@dataclass
class Pool:
    """Workers of a cluster and their holders. Not thread-safe."""

    free: set[str] = field(default_factory=set)
    """Workers without a holder."""
    _held: dict[Hashable, set[str]] = field(default_factory=dict)
    """Workers by holder."""
    _wanted: dict[Hashable, int] = field(default_factory=dict)
    """Requested number of workers, by holder."""

    @property
    def num_free(self) -> int:
        """Number of free workers for new gangs, less the replacements that older gangs wait for."""
        return max(0, len(self.free) - sum(self._num_missing(holder) for holder in self._held))

    @property
    def num_workers(self) -> int:
        """Number of all workers, free and held."""
        return len(self.free) + sum(map(len, self._held.values()))

    @property
    def is_in_use(self) -> bool:
        """True if the pool has a holder."""
        return bool(self._held)

    def update(self, present: Iterable[str]) -> None:
        """Set the present workers. Absent workers are taken from their holders."""
        there = set(present)
        for workers in self._held.values():
            workers.intersection_update(there)
        self.free = there.difference(*self._held.values())

    def acquire(self, holder: Hashable, count: int) -> list[str] | None:
        """Assign `count` workers to a new holder and return them, or return None if too few are free."""
        if count > self.num_free:
            return None
        self._held[holder], self._wanted[holder] = set(), count
        return self.refill(holder)

    def refill(self, holder: Hashable) -> list[str]:
        """Replace a holder's lost workers by free ones, and return all its workers."""
        missing = sorted(self.free, key=worker_order)[: self._num_missing(holder)]
        self.free.difference_update(missing)
        self._held[holder].update(missing)
        return sorted(self._held[holder], key=worker_order)

    def release(self, holder: Hashable) -> None:
        """Remove a holder and free its workers."""
        self.free |= self._held.pop(holder)
        del self._wanted[holder]

    def _num_missing(self, holder: Hashable) -> int:
        return self._wanted[holder] - len(self._held[holder])


class Share(DaskAgents):
    """Starts one gang's agents on its share of the workers, and on replacements for lost workers."""

    def __init__(self, cluster: DaskAgents, workers: Sequence[str], refill: Callable[[], list[str]]) -> None:
        """Prepare the launcher.

        Args:
            cluster: Launcher for the whole cluster.
            workers: Workers of the gang.
            refill: Replaces the gang's lost workers by free ones, and returns all its workers.
        """
        vars(self).update(vars(cluster))
        self._futures = []  # `close` ends only this gang's agents
        self._refill = refill
        self.workers = workers
        self.num_wanted = len(workers)

    def present(self) -> list[str]:
        """Return the gang's workers, including replacements for lost workers."""
        return self._refill()
