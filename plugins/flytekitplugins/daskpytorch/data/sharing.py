"""Which rank gets which partition. Pure; runs in every rank, and all agree since all have the same answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["share_out"]

TOLERANCE = 1.1
"""How much more than the average a rank may have before partitions leave the workers where they lie."""


@dataclass
class _Rank:
    partitions: list[int] = field(default_factory=list)
    load: int = 0


def share_out(num_partitions: int, held: Sequence[Mapping[int, int]]) -> list[list[int]]:
    """Give every partition to one rank: where it lies, unless that rank would have far more bytes than others.

    Args:
        num_partitions: They are called 0, 1, ...
        held: For each rank, the partitions that its worker holds, and their bytes.

    Returns:
        For each rank, its partitions, ascending. None goes without where there are as many partitions as ranks.
    """
    sizes = _sizes(num_partitions, held)
    ranks = [_Rank() for _ in held]
    # The largest first, so that small ones fill the gaps; among equals by their numbers.
    for partition in sorted(range(num_partitions), key=lambda number: (-sizes[number], number)):
        holders = [rank for rank, has in zip(ranks, held, strict=True) if partition in has]
        _give(partition, sizes, min(holders or ranks, key=lambda rank: rank.load))
    for rank in ranks:
        most = max(ranks, key=lambda other: len(other.partitions))
        if not rank.partitions and len(most.partitions) > 1:
            _move(most.partitions[-1], sizes, most, rank)
    _level(ranks, sizes)
    return [sorted(rank.partitions) for rank in ranks]


def _sizes(num_partitions: int, held: Sequence[Mapping[int, int]]) -> list[int]:
    """Bytes of each partition, at least 1; the average for those that nobody here holds."""
    known: dict[int, int] = {}
    for has in held:
        for partition, size in has.items():
            known[partition] = max(size, known.get(partition, 1))
    average = sum(known.values()) // len(known) if known else 1
    return [known.get(partition, average) for partition in range(num_partitions)]


def _level(ranks: Sequence[_Rank], sizes: Sequence[int]) -> None:
    """Move partitions from the rank with most bytes to that with least, while it has more than the tolerance."""
    average = sum(sizes) / len(ranks)
    while True:
        most, least = max(ranks, key=lambda rank: rank.load), min(ranks, key=lambda rank: rank.load)
        gap = most.load - least.load
        # Half the gap would make both equal; all of it, or more, only changes their places. A rank's last partition is
        # that much.
        movable = [partition for partition in most.partitions if sizes[partition] < gap]
        if most.load <= TOLERANCE * average or not movable:
            return
        _move(min(movable, key=lambda partition: abs(gap - 2 * sizes[partition])), sizes, most, least)


def _move(partition: int, sizes: Sequence[int], source: _Rank, target: _Rank) -> None:
    source.partitions.remove(partition)
    source.load -= sizes[partition]
    _give(partition, sizes, target)


def _give(partition: int, sizes: Sequence[int], rank: _Rank) -> None:
    rank.partitions.append(partition)
    rank.load += sizes[partition]
