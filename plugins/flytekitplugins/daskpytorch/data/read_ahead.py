"""Tells a dataset which batch its process has to read next. Runs in the process that has the loader.

A `DataLoader` asks a dataset for one batch at a time, and only the sampler knows the next one. Loader workers take
turns, so the next batch of a worker comes as many batches later as there are workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from torch.utils.data import Sampler, Subset


class Batches(Protocol):
    """A batch sampler, such as torch's `BatchSampler` and `RankBatches`."""

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of each batch."""

    def __len__(self) -> int:
        """Return the number of batches."""


class ReadAhead(Sampler[list[int]]):
    """The batches of another sampler, each with the indices of the next batch, which `S3ImageFolder` reads ahead.

    Use it as `DataLoader(batch_sampler=...)`. `RankLoader` needs no `ReadAhead`. For other datasets a batch is a plain
    list. torch's `Subset` loses the indices of the next batch: let the sampler choose among the indices of the whole
    dataset instead. `ReadAhead` asks its sampler for as many more batches in advance as there are workers.

    Examples:
        >>> from torch.utils.data import BatchSampler, DataLoader, RandomSampler
        >>> from torchvision.transforms import v2
        >>> from flytekitplugins.daskpytorch import data
        >>> dogs = data.S3ImageFolder("s3://pictures/dogs", transform=v2.Resize((32, 32)), decoder="tensor")
        >>> batches = BatchSampler(RandomSampler(dogs), batch_size=4, drop_last=False)
        >>> loader = DataLoader(dogs, batch_sampler=data.ReadAhead(batches, num_workers=2), num_workers=2)
        >>> [len(labels) for images, labels in loader]
        [4, 4]
    """

    def __init__(self, batches: Batches, num_workers: int = 0) -> None:
        """Yield the batches of a batch sampler.

        Args:
            batches: A batch sampler.
            num_workers: The loader's `num_workers`. With another number, pictures are read ahead in vain.

        Raises:
            ValueError: `num_workers` is below 0.
        """
        if num_workers < 0:
            raise ValueError(f"num_workers={num_workers}: must be a whole number from 0 up, the DataLoader's own")
        self._batches = batches
        self._distance = max(1, num_workers)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches in their order."""
        waiting: deque[_Batch] = deque()
        for numbers in self._batches:
            waiting.append(_Batch(numbers))
            if len(waiting) > self._distance:
                batch = waiting.popleft()
                batch.ahead = list(waiting[-1])
                yield batch
        yield from waiting

    def __len__(self) -> int:
        return len(self._batches)


class _Batch(list[int]):
    """A batch with the indices of the next one, which a pickle keeps."""

    ahead: Sequence[int] = ()


def ahead_of(batch: Iterable[int]) -> Sequence[int]:
    """Return the indices of this process's next batch. Empty if they are not known."""
    return batch.ahead if isinstance(batch, _Batch) else ()


def reading_ahead(dataset: Any, batches: Batches, num_workers: int) -> tuple[Any, Batches]:
    """Return the dataset and the batches for a `DataLoader` that reads the next batch ahead.

    A `Subset` of a dataset that reads ahead becomes the whole dataset, with indices of the whole. Any other dataset is
    returned unchanged.
    """
    whole, parts = dataset, []
    while type(whole) is Subset:
        parts.append(whole.indices)
        whole = whole.dataset
    if not getattr(whole, "reads_ahead", False):
        return dataset, batches
    return whole, ReadAhead(_Renumbered(batches, parts), num_workers)


class _Renumbered:
    """The batches of a `Subset` as indices of the whole dataset, through any number of nested subsets."""

    def __init__(self, batches: Batches, parts: Sequence[Sequence[int]]) -> None:
        self._batches, self._parts = batches, parts

    def __iter__(self) -> Iterator[list[int]]:
        for numbers in self._batches:
            yield [self._in_whole(number) for number in numbers]

    def __len__(self) -> int:
        return len(self._batches)

    def _in_whole(self, number: int) -> int:
        for part in self._parts:
            number = part[number]
        return number
