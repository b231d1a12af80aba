"""The pictures of the next batch are requested before the loop asks for them."""

import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Subset

import fault_proxy as faults
from fault_proxy import FaultProxy
from flytekitplugins.daskpytorch import data
from flytekitplugins.daskpytorch.data.rank_loader import ahead_of, numbers_in_whole
from jpegs import encoded, photo
from processes import until
from seaweed import Weed

BUCKET = "ahead"
NUM_PICTURES = 12
PATIENCE = 60.0


def batches_of(num_batches: int) -> list[list[int]]:
    return [[3 * number, 3 * number + 1, 3 * number + 2] for number in range(num_batches)]


@given(num_batches=st.integers(0, 9), num_workers=st.integers(0, 4))
def test_the_hint_is_the_next_batch_of_the_same_worker(num_batches: int, num_workers: int) -> None:
    batches = batches_of(num_batches)
    sampler = data.ReadAhead(batches, num_workers)
    hinted = list(sampler)
    assert hinted == batches
    assert len(sampler) == num_batches
    for worker in range(max(1, num_workers)):
        own = hinted[worker :: max(1, num_workers)]
        assert [list(ahead_of(batch)) for batch in own] == [*map(list, own[1:]), []][: len(own)]


def test_the_hint_travels_to_a_worker() -> None:
    first = next(iter(data.ReadAhead(batches_of(2))))
    assert ahead_of(pickle.loads(pickle.dumps(first))) == [3, 4, 5]
    assert ahead_of([1, 2]) == ()


class Numbers(Dataset[int]):
    """Remembers in which batches it was asked."""

    reads_ahead = True

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], list[int]]] = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: Sequence[int]) -> list[int]:
        self.asked.append((list(indices), list(ahead_of(indices))))
        return list(indices)


class Plain(Numbers):
    reads_ahead = False


def test_a_part_of_a_part_is_read_ahead_by_the_whole() -> None:
    whole = Numbers()
    part = Subset(Subset(whole, [9, 7, 5, 3, 1]), [4, 3, 0])
    loader = data.RankLoader(part, batch_size=2, shuffle=False, rank=0, world_size=1)
    assert loader.num_items == 3
    assert [batch.tolist() for batch in loader] == [[1, 3], [9]]
    assert whole.asked == [([1, 3], [9]), ([9], [])]
    assert loader.share.tolist() == [2]


def test_others_are_left_as_they_are() -> None:
    for dataset in (Plain(), Subset(Plain(), range(10))):
        assert numbers_in_whole(dataset) == (dataset, None)


# ---- Pictures


@pytest.fixture(scope="module")
def proxy(weed: Weed) -> Iterator[FaultProxy]:
    pictures = {f"all/{'ab'[number % 2]}/{number:02d}.jpg": encoded(photo(number, (64, 48))) for number in range(12)}
    weed.put_all(BUCKET, pictures)
    with FaultProxy(weed.endpoint) as proxy:
        yield proxy


def as_tensor(picture: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(picture))


@pytest.fixture
def pictures(weed: Weed, proxy: FaultProxy) -> data.S3ImageFolder:
    """Read through the proxy, which has counted nothing yet."""
    dataset = data.S3ImageFolder(
        BUCKET, "all", as_tensor, storage_options=weed.options(endpoint=proxy.endpoint), timeout=PATIENCE
    )
    proxy.heal()
    return dataset


def requests(proxy: FaultProxy) -> Counter[str]:
    return Counter({path: count for path, count in proxy.requests.items() if path.endswith(".jpg")})


def once(dataset: data.S3ImageFolder, indices: Sequence[int]) -> Counter[str]:
    return Counter(f"/{BUCKET}/{dataset.all_files[index]}" for index in indices)


def await_requests(proxy: FaultProxy, wanted: Counter[str]) -> None:
    until(lambda: requests(proxy) == wanted, lambda: f"{wanted}, so far {requests(proxy)}")


def test_the_next_batch_is_asked_for_before_it_is_wanted(pictures: data.S3ImageFolder, proxy: FaultProxy) -> None:
    first, second, third = data.ReadAhead([[0, 1], [2, 3], [4, 5]])
    pictures.__getitems__(first)
    await_requests(proxy, once(pictures, [0, 1, 2, 3]))
    items = pictures.__getitems__(second)
    await_requests(proxy, once(pictures, range(6)))
    assert all(torch.equal(picture, pictures[index][0]) for index, (picture, _) in enumerate(items, start=2))
    proxy.heal()
    pictures.__getitems__(third)
    assert not requests(proxy)


def test_what_was_read_ahead_in_vain_is_forgotten(pictures: data.S3ImageFolder, proxy: FaultProxy) -> None:
    first, *_ = data.ReadAhead([[0, 1], [2, 3]])
    pictures.__getitems__(first)
    await_requests(proxy, once(pictures, range(4)))
    pictures.__getitems__([4, 5])
    pictures.__getitems__([2, 3])
    assert requests(proxy) == once(pictures, [0, 1, 2, 3, 4, 5, 2, 3])


def test_an_error_in_reading_ahead_is_that_of_its_batch(pictures: data.S3ImageFolder, proxy: FaultProxy) -> None:
    proxy.fail(faults.denied("AccessDenied"), pictures.all_files[2])
    first, second = data.ReadAhead([[0, 1], [2, 3]])
    assert len(pictures.__getitems__(first)) == 2
    await_requests(proxy, once(pictures, range(4)))
    with pytest.raises(PermissionError, match=pictures.all_files[2]):
        pictures.__getitems__(second)


@pytest.mark.parametrize("num_workers", [0, 2, 3])
def test_every_picture_is_read_once_an_epoch(pictures: data.S3ImageFolder, proxy: FaultProxy, num_workers: int) -> None:
    batches = BatchSampler(RandomSampler(pictures), 2, drop_last=False)
    loader = DataLoader(pictures, batch_sampler=data.ReadAhead(batches, num_workers), num_workers=num_workers)
    assert sum(len(labels) for _, labels in loader) == NUM_PICTURES
    assert requests(proxy) == once(pictures, range(NUM_PICTURES))
