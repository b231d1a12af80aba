"""Each rank gets its share of the partitions."""

import itertools
import pickle
import random

import pytest

from flytekitplugins.daskpytorch.data.partitions import TOLERANCE, share_out


def lie(*on: list[int], size: int = 1_000) -> list[dict[int, int]]:
    """Partitions of one size, as the ranks' workers hold them."""
    return [dict.fromkeys(numbers, size) for numbers in on]


def test_partitions_stay_where_they_lie() -> None:
    assert share_out(6, lie([4, 1], [3, 0], [2, 5])) == [[1, 4], [0, 3], [2, 5]]


def test_a_little_more_is_no_reason_to_move() -> None:
    held = [{number: 1_000 + number for number in range(8)}, {number: 990 - number for number in range(8, 16)}]
    assert share_out(16, held) == [list(range(8)), list(range(8, 16))]


def test_partitions_that_may_stay_do_not_make_room_for_others() -> None:
    sizes = {number: 1_000 - number for number in range(8)}
    held = [{number: sizes[number] for number in numbers} for numbers in ([0, 1, 2, 3], [4, 5], [6], [7])]
    assert share_out(8, held) == [[0, 1], [4, 5], [3, 6], [2, 7]]


def test_what_lies_on_one_worker_is_shared_by_all() -> None:
    shares = share_out(12, lie(list(range(12)), [], []))
    assert [len(share) for share in shares] == [4, 4, 4]


def test_a_rank_whose_worker_holds_nothing_gets_one() -> None:
    assert share_out(3, [{0: 10_000}, {1: 1, 2: 1}, {}]) == [[0], [1], [2]]


def test_large_partitions_weigh_more() -> None:
    sizes = dict.fromkeys(range(6), 1_000) | {6: 6_000}
    assert share_out(7, [sizes, {}]) == [[6], [0, 1, 2, 3, 4, 5]]


def test_ranks_of_one_worker_share_what_it_holds() -> None:
    here, there = dict.fromkeys(range(4), 10), dict.fromkeys(range(4, 8), 10)
    shares = share_out(8, [here, here, there, there])
    assert [len(share) for share in shares] == [2, 2, 2, 2]
    assert sorted(shares[0] + shares[1]) == [0, 1, 2, 3]


def test_what_nobody_here_holds_is_shared_evenly() -> None:
    assert [len(share) for share in share_out(8, [{}, {}, {}, {}])] == [2, 2, 2, 2]
    assert [len(share) for share in share_out(6, lie([0, 1], [2]))] == [3, 3]


@pytest.mark.parametrize("seed", range(100))
def test_none_is_lost_none_is_twice_and_no_rank_goes_without(seed: int) -> None:
    chance = random.Random(seed)
    num_ranks, num_partitions = chance.randint(1, 9), chance.randint(1, 60)
    held: list[dict[int, int]] = [{} for _ in range(num_ranks)]
    for partition in range(num_partitions):
        size = chance.choice([0, 1, 50, 1_000, 1_010, 10**9])
        for rank in chance.sample(range(num_ranks), chance.randint(0, min(2, num_ranks))):
            held[rank][partition] = size
    shares = share_out(num_partitions, held)
    assert shares == share_out(num_partitions, pickle.loads(pickle.dumps(held)))  # all ranks compute the same
    assert sorted(itertools.chain(*shares)) == list(range(num_partitions))
    if num_partitions >= num_ranks:
        assert all(shares)


@pytest.mark.parametrize("seed", range(100))
def test_no_rank_has_far_more_than_the_others(seed: int) -> None:
    chance = random.Random(seed)
    num_ranks = chance.randint(2, 6)
    sizes = [chance.randint(500, 1_500) for _ in range(num_ranks * 8)]
    held: list[dict[int, int]] = [{} for _ in range(num_ranks)]
    for partition, size in enumerate(sizes):
        held[min(chance.randrange(num_ranks), chance.randrange(num_ranks))][partition] = size  # the first have most
    loads = [sum(sizes[partition] for partition in share) for share in share_out(len(sizes), held)]
    average = sum(sizes) / num_ranks
    assert max(loads) <= max(TOLERANCE * average, min(loads) + max(sizes))
