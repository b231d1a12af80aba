"""Which of many gangs start now, and on which workers. Pure; runs in the driver.

Whole gangs or none, the largest first: when a gang ends, the workers that it leaves are enough for the next one of its
size, so large gangs do not starve although smaller ones fill every gap.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from flytekitplugins.daskpytorch.protocol.placement import worker_order


@dataclass
class Pool:
    """The workers of a cluster, and who holds them. Not safe for threads."""

    free: set[str] = field(default_factory=set)
    """Workers that nobody holds."""
    _held: dict[Hashable, set[str]] = field(default_factory=dict)
    """Holder -> its workers."""
    _wanted: dict[Hashable, int] = field(default_factory=dict)
    """Holder -> how many it is to have."""

    @property
    def num_free(self) -> int:
        """Workers for new gangs: the free ones without those that older gangs have lost and wait for."""
        return max(0, len(self.free) - sum(self._num_missing(holder) for holder in self._held))

    @property
    def num_workers(self) -> int:
        """All workers."""
        return len(self.free) + sum(map(len, self._held.values()))

    @property
    def is_in_use(self) -> bool:
        """Whether anybody holds workers."""
        return bool(self._held)

    def update(self, present: Iterable[str]) -> None:
        """Take note of the workers that are there now."""
        there = set(present)
        for workers in self._held.values():
            workers.intersection_update(there)
        self.free = there.difference(*self._held.values())

    def acquire(self, holder: Hashable, count: int) -> list[str] | None:
        """Give a new holder so many workers, or nothing where there are not enough."""
        if count > self.num_free:
            return None
        self._held[holder], self._wanted[holder] = set(), count
        return self.refill(holder)

    def refill(self, holder: Hashable) -> list[str]:
        """All the workers of a holder, after it was given free ones for those that it has lost."""
        missing = sorted(self.free, key=worker_order)[: self._num_missing(holder)]
        self.free.difference_update(missing)
        self._held[holder].update(missing)
        return sorted(self._held[holder], key=worker_order)

    def release(self, holder: Hashable) -> None:
        """Take back what a holder has."""
        self.free |= self._held.pop(holder)
        del self._wanted[holder]

    def _num_missing(self, holder: Hashable) -> int:
        return self._wanted[holder] - len(self._held[holder])
