"""A loader that gangs of any size go on with: nothing is lost, nothing comes twice, also where workers prefetch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from flytekitplugins.daskpytorch.data import RankLoader

NUMBERS = TensorDataset(torch.arange(100))


class Noise(Dataset[int]):
    """What a loader worker draws, as an augmentation does."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return int(torch.randint(2**31, ()))


def gang(world_size: int, batch_size: int = 8, dataset: Any = NUMBERS, **options: Any) -> list[RankLoader]:
    return [
        RankLoader(dataset, batch_size, seed=3, rank=rank, world_size=world_size, **options)
        for rank in range(world_size)
    ]


def take(loaders: Sequence[RankLoader], count: int) -> list[int]:
    """The items of so many steps of all ranks; the loops are left early."""
    seen: list[int] = []
    for loader in loaders:
        for _, (items,) in zip(range(count), loader, strict=False):
            seen += items.tolist()
    return seen


def rest(loaders: Sequence[RankLoader]) -> list[int]:
    """The items of the rest of the epoch, of all ranks."""
    return [int(item) for loader in loaders for (items,) in loader if loader.weight for item in items]


@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": True}])
@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (3, 2), (2, 4)])
def test_another_gang_goes_on_with_the_next_item(sizes: tuple[int, int], options: dict[str, Any]) -> None:
    before, after = sizes
    first = gang(before, **options)
    seen = take(first, 2)
    states = [loader.state_dict() for loader in first]
    assert states == states[:1] * before
    assert len(seen) == states[0]["num_seen"]  # and not what was fetched ahead
    second = gang(after, batch_size=5, **options)
    for loader in second:
        loader.load_state_dict(states[0])
    assert Counter(seen + rest(second)) == Counter(range(100))
    assert [loader.state_dict()["epoch"] for loader in second] == [1] * after
    assert Counter(rest(second)) == Counter(range(100))


def test_the_same_gang_goes_on_with_the_same_batches() -> None:
    whole = [items.tolist() for (items,) in gang(1)[0]]
    for num_steps in range(len(whole) + 1):
        (first,), (second,) = gang(1), gang(1)
        take([first], num_steps)
        second.load_state_dict(first.state_dict())
        assert len(second) == len(whole) - num_steps
        assert [items.tolist() for (items,) in second] == whole[num_steps:]


def test_a_loop_that_is_left_is_gone_on_with_by_the_next_one() -> None:
    (loader,) = gang(1, num_workers=1, persistent_workers=True)
    assert Counter(take([loader], 3) + take([loader], 2) + rest([loader])) == Counter(range(100))


def test_epochs_differ_and_are_counted() -> None:
    (loader,) = gang(1)
    assert loader.num_batches_left(3) == 39
    first = rest([loader])
    assert loader.num_batches_left(3) == 26
    assert rest([loader]) != first
    assert loader.epoch == 2
    take([loader], 4)
    assert loader.num_batches_left(3) == 9
    assert rest(gang(1, shuffle=False)) == list(range(100))


def test_weights_make_the_mean_over_all_items() -> None:
    loaders = gang(3, dataset=Subset(NUMBERS, range(50)))
    steps = zip(
        *([(loader.weight, items.double().mean().item()) for (items,) in loader] for loader in loaders), strict=True
    )
    means = [sum(weight * mean for weight, mean in step) / 3 for step in steps]
    (alone,) = gang(1, batch_size=24, dataset=Subset(NUMBERS, range(50)))
    assert means == pytest.approx([items.double().mean().item() for (items,) in alone])


def test_a_rank_without_an_item_is_given_one_without_weight() -> None:
    (alone,) = gang(1, batch_size=1, dataset=Subset(NUMBERS, range(5)))
    (last,) = set(range(5)) - set(take([alone], 4))
    found = []
    for loader in gang(3, batch_size=1, dataset=Subset(NUMBERS, range(5))):
        loader.load_state_dict(alone.state_dict())
        found += [(items.tolist(), loader.share.tolist(), loader.weight) for (items,) in loader]
    assert found == [([last], [last], 3), ([last], [], 0), ([last], [], 0)]


def test_it_draws_from_no_global_generator() -> None:
    (loader,) = gang(1)
    before = torch.get_rng_state()
    rest([loader])
    assert torch.equal(torch.get_rng_state(), before)


def test_loader_workers_draw_alike_in_the_same_place_alone() -> None:
    def drawn(loaders: Sequence[RankLoader]) -> list[list[int]]:
        return [[number for batch in loader for number in batch.tolist()] for loader in loaders]

    loaders = gang(2, dataset=Noise(), num_workers=1)
    first, second = drawn(loaders), drawn(loaders)
    assert len({*map(tuple, first), *map(tuple, second)}) == 4  # ranks and epochs differ
    again = gang(2, dataset=Noise(), num_workers=1)
    for loader in again:
        loader.load_state_dict(loader.state_dict() | {"epoch": 1})
    assert drawn(again) == second


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_items": 99}, "num_items=99, but now there is num_items=100"),
        ({"seed": 4}, "seed=4, .* seed=3"),
        ({"shuffle": False}, "shuffle=False"),
    ],
)
def test_the_state_of_another_order_is_refused(changed: dict[str, Any], said: str) -> None:
    (loader,) = gang(1)
    with pytest.raises(ValueError, match=said):
        loader.load_state_dict(loader.state_dict() | changed)
