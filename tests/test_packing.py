"""Gangs start on free workers in a good order. Simulated without a clock, and compared with lower bounds."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

import pytest

from flytekitplugins.daskpytorch.sweep.sweep import Pool

WORKERS = [f"tcp://10.0.0.{number}:1" for number in range(1, 5)]


def makespan(sizes: Sequence[int], lengths: Sequence[float], num_workers: int = 4) -> float:
    """How long all take when each starts as the pool allows, the largest first; asserts that nothing waits in vain."""
    pool = Pool(free=set(WORKERS[:num_workers]))
    waiting = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    running: list[tuple[float, int]] = []
    now = 0.0
    while waiting or running:
        for index in list(waiting):
            if pool.acquire(index, sizes[index]) is not None:
                waiting.remove(index)
                heapq.heappush(running, (now + lengths[index], index))
        assert all(sizes[index] > pool.num_free for index in waiting)
        now, ended = heapq.heappop(running)
        pool.release(ended)
    return now


@pytest.mark.parametrize("seed", range(20))
def test_equal_work_of_mixed_sizes_is_packed_as_tightly_as_can_be(seed: int) -> None:
    sizes = random.Random(seed).choices([1, 2, 4], k=27)
    slots = sizes.count(4) + -(-(2 * sizes.count(2) + sizes.count(1)) // 4)
    assert makespan(sizes, [1.0] * 27) == slots


@pytest.mark.parametrize("seed", range(20))
def test_unequal_work_costs_at_most_the_longest_ones_end(seed: int) -> None:
    """Lengths are not known beforehand; the last model may start when all others are about to end."""
    generator = random.Random(seed)
    sizes = generator.choices([1, 2, 4], k=27)
    lengths = [generator.uniform(1, 3) for _ in sizes]
    area = sum(size * length for size, length in zip(sizes, lengths, strict=True)) / 4
    assert area <= makespan(sizes, lengths) <= area + max(lengths)


def test_all_or_nothing() -> None:
    pool = Pool(free=set(WORKERS))
    assert pool.acquire("a", 3) == WORKERS[:3]
    assert pool.acquire("b", 2) is None
    assert pool.acquire("c", 1) == WORKERS[3:]
    pool.release("a")
    assert pool.acquire("b", 2) == WORKERS[:2]


def test_a_lost_worker_that_nothing_replaces_yet() -> None:
    pool = Pool(free=set(WORKERS[:2]))
    pool.acquire("a", 2)
    pool.update(WORKERS[:1])
    assert pool.refill("a") == WORKERS[:1]
    pool.update([WORKERS[0], WORKERS[3]])
    assert pool.num_free == 0
    assert pool.refill("a") == [WORKERS[0], WORKERS[3]]
    pool.release("a")
    assert pool.free == {WORKERS[0], WORKERS[3]}
    assert not pool.is_in_use
