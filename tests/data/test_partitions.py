"""Each rank gets its share of the partitions."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@given(num_partitions=st.integers(1, 60), held=st.lists(st.sets(st.integers(0, 59)), min_size=1, max_size=9))
def test_none_is_lost_none_is_twice_and_shares_are_even(num_partitions: int, held: list[set[int]]) -> None:
    shares = share_out(num_partitions, held)
    assert sorted(itertools.chain(*shares)) == list(range(num_partitions))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
