"""`RankLoader`: gangs of any size resume without losing or repeating an item, also with loader workers."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from flytekitplugins.daskpytorch.data import RankLoader

NUMBERS = TensorDataset(torch.arange(100))


class Noise(Dataset[int]):
    """What a loader worker draws, as an augmentation does."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return int(torch.randint(2**31, ()))


class Stream(IterableDataset[int]):
    """Items without numbers."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


class Attempt(NamedTuple):
    """A gang, and after how many steps it is interrupted."""

    world_size: int
    batch_size: int
    num_steps: int


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, list[Attempt]]:
    """So many items, and the gangs that see them one after the other."""
    num_items = draw(st.integers(1, 40))
    attempts = st.builds(Attempt, st.integers(1, min(num_items, 6)), st.integers(1, 9), st.integers(0, 12))
    return num_items, draw(st.lists(attempts, min_size=1, max_size=8))


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


def steps(loaders: Sequence[RankLoader]) -> Iterator[tuple[int, list[list[int]]]]:
    """The epoch of each step of a gang, all epochs long, and each rank's items in it; all agree on where it is."""
    while True:
        epoch = loaders[0].epoch
        for batches in zip(*loaders, strict=True):
            states = [loader.state_dict() for loader in loaders]
            assert states == states[:1] * len(loaders)
            yield (
                epoch,
                [items.tolist() if loader.weight else [] for loader, (items,) in zip(loaders, batches, strict=True)],
            )


def undisturbed(dataset: Any, epoch: int, *, shuffle: bool) -> list[int]:
    """An epoch in one batch."""
    (alone,) = gang(1, len(dataset), dataset, shuffle=shuffle)
    alone.load_state_dict(alone.state_dict() | {"epoch": epoch})
    return rest([alone])


@settings(max_examples=200)
@given(history=histories(), shuffle=st.booleans(), drop_last=st.booleans())
def test_gangs_of_any_sizes_see_together_what_one_undisturbed_process_sees(
    history: tuple[int, list[Attempt]], shuffle: bool, drop_last: bool
) -> None:
    num_items, attempts = history
    dataset = TensorDataset(torch.arange(num_items))
    state, epoch, num_seen = None, 0, 0
    for attempt in attempts:
        step_size = attempt.world_size * attempt.batch_size
        if drop_last and step_size > num_items:
            with pytest.raises(ValueError, match=f"drop_last=True leaves nothing: one step takes {step_size} items"):
                gang(attempt.world_size, attempt.batch_size, dataset, drop_last=True)
            continue
        loaders = gang(attempt.world_size, attempt.batch_size, dataset, shuffle=shuffle, drop_last=drop_last)
        for loader in loaders if state else ():
            loader.load_state_dict(state)
        for now, shares in islice(steps(loaders), attempt.num_steps):
            if now != epoch:
                assert now == epoch + 1
                assert num_items - num_seen < (step_size if drop_last else 1)
                epoch, num_seen = now, 0
            whole, items = undisturbed(dataset, epoch, shuffle=shuffle), [item for share in shares for item in share]
            assert sorted(whole) == list(range(num_items))
            assert items
            assert items == whole[num_seen : num_seen + len(items)]
            assert not drop_last or [len(share) for share in shares] == [attempt.batch_size] * attempt.world_size
            sizes = [len(share) for share in shares]
            assert max(sizes) - min(sizes) <= 1
            assert min(sizes) or num_items - num_seen < attempt.world_size  # only a restart leaves so few
            num_seen += len(items)
            state = loaders[-1].state_dict()


def test_what_loader_workers_have_fetched_ahead_is_not_seen() -> None:
    options: dict[str, Any] = {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": True}
    first = gang(3, **options)
    seen = take(first, 2)
    state = first[0].state_dict()
    assert len(seen) == state["num_seen"]
    second = gang(2, batch_size=5, **options)
    for loader in second:
        loader.load_state_dict(state)
    assert Counter(seen + rest(second)) == Counter(range(100))


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


def test_without_a_gang_it_shares_with_the_process_group() -> None:
    """Such as torchrun's: else each of its processes would see everything, without a word."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        own = rest([RankLoader(NUMBERS, 8, seed=3)])
    finally:
        dist.destroy_process_group()
    assert own == rest(gang(2)[1:])
    assert len(rest([RankLoader(NUMBERS, 8)])) == 100


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
    (later,) = gang(1, dataset=Noise(), num_workers=1)
    later.load_state_dict(later.state_dict() | {"num_seen": 4})
    (start,) = gang(1, 4, dataset=Noise(), num_workers=1)
    assert not set(*drawn([later])) & set(*drawn([start]))  # not what the epoch began with


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_items": 99}, "num_items=99, but now there is num_items=100"),
        ({"seed": 4}, "seed=4, .* seed=3"),
        ({"shuffle": False}, "shuffle=False"),
    ],
)
def test_a_state_of_another_order_is_refused_and_changes_nothing(changed: dict[str, Any], said: str) -> None:
    (loader,) = gang(1)
    take([loader], 2)
    before = loader.state_dict()
    with pytest.raises(ValueError, match=said):
        loader.load_state_dict(before | changed)
    assert loader.state_dict() == before


@pytest.mark.parametrize("state", [None, {}, {"_snapshot": {}}, 16, [0, 16]])
def test_what_another_loader_saved_is_refused(state: Any) -> None:
    (loader,) = gang(1)
    with pytest.raises(
        ValueError, match=r"is not what RankLoader\.state_dict\(\) returns: a dictionary with epoch, num_seen, "
    ):
        loader.load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sampler": [1]}, r"sampler=\[1\]\): must be left out"),
        ({"batch_sampler": [[1]], "generator": None}, r"batch_sampler=.*generator=None\): must be left out"),
        ({"in_order": False, "num_workers": 1}, r"in_order=False\): must be True"),
        ({"dataset": Stream()}, r"dataset=.*\): must be map-style"),
        ({"dataset": iter([1])}, r"dataset=.*\): must be map-style"),
    ],
)
def test_what_would_make_the_order_anothers_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        gang(1, **options)


def test_a_loop_that_another_one_overtook_ends_in_an_error() -> None:
    (loader,) = gang(1)
    for change in (lambda: rest([loader]), lambda: loader.load_state_dict(loader.state_dict() | {"num_seen": 0})):
        loop = iter(loader)
        next(loop)
        change()
        with pytest.raises(RuntimeError, match=r"cannot go on, because another loop .* has begun, or load_state_dict"):
            next(loop)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        *(({"seed": seed}, "seed=.*: must be a whole number of at most 63 bits") for seed in (1.0, None, True, 2**63)),
        *(({"batch_size": size}, "batch_size=.*: must be a whole number from 1") for size in (1.5, "2", True)),
        ({"batch_size": 0, "world_size": 0}, r"RankLoader\(batch_size=0\): .*; RankLoader\(world_size=0\): must be"),
        *(({"rank": rank}, r"\(rank=.*\): must be a whole number from 0 and below") for rank in (0.0, 1)),
        ({"world_size": 2}, "1 items cannot be shared by 2 ranks"),
    ],
)
def test_impossible_numbers_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RankLoader([0], **{"batch_size": 1, "rank": 0, "world_size": 1} | given)
