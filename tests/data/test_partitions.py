"""Each rank gets its share of the partitions."""

import itertools
import random

import pytest

from flytekitplugins.daskpytorch.data.partitions import share_out


@pytest.mark.parametrize(
    ("held", "shares"),
    [
        ([{4, 1}, {3, 0}, {2, 5}], [[1, 4], [0, 3], [2, 5]]),
        ([{0, 1, 2, 3}, {0, 1, 2, 3}, {4, 5, 6, 7}, {4, 5, 6, 7}], [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ([{0, 1, 2, 3, 4, 5}, set(), set()], [[0, 1], [2, 4], [3, 5]]),
        ([{0, 2, 3}, {1, 4}], [[0, 2, 3], [1, 4]]),
        ([set(), set()], [[0, 2], [1, 3]]),
    ],
    ids=["each its own", "ranks of one worker", "all on one worker", "one more at home", "nowhere"],
)
def test_a_rank_gets_its_workers_partitions_up_to_an_even_share(held: list[set[int]], shares: list[list[int]]) -> None:
    assert share_out(sum(map(len, shares)), held) == shares


@pytest.mark.parametrize("seed", range(100))
def test_none_is_lost_none_is_twice_and_shares_are_even(seed: int) -> None:
    chance = random.Random(seed)
    num_ranks, num_partitions = chance.randint(1, 9), chance.randint(1, 60)
    held: list[set[int]] = [set() for _ in range(num_ranks)]
    for partition in range(num_partitions):
        for rank in chance.sample(range(num_ranks), chance.randint(0, min(2, num_ranks))):
            held[rank].add(partition)
    shares = share_out(num_partitions, held)
    assert sorted(itertools.chain(*shares)) == list(range(num_partitions))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
