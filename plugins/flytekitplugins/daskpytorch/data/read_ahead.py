"""Tells a data set which batch its process is asked for next. Runs in the process that has the loader.

A `DataLoader` gives a data set one batch at a time. Which is next is known to the sampler alone: with loader workers,
which take turns, it is the one that comes as many batches later as there are workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from torch.utils.data import Sampler, Subset


class Batches(Protocol):
    """A batch sampler, such as torch's `BatchSampler` and `RankBatches`."""

    def __iter__(self) -> Iterator[list[int]]:
        """The numbers of each batch."""

    def __len__(self) -> int:
        """How many there are."""


class ReadAhead(Sampler[list[int]]):
    """The batches of another sampler, each with a hint which one is next, by which `S3ImageFolder` reads it ahead.

    For `DataLoader(batch_sampler=...)`; `RankLoader` does it by itself. To other data sets a batch is a list, as ever.
    torch's `Subset` loses the hint: let the sampler choose among the whole data set's numbers instead. The sampler is
    asked for as many batches more in advance as there are workers.

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
        """Give the same batches.

        Args:
            batches: A batch sampler.
            num_workers: The loader's; with another number pictures are read that nobody asks for.

        Raises:
            ValueError: `num_workers` is below 0.
        """
        if num_workers < 0:
            raise ValueError(f"num_workers={num_workers}: must be a whole number from 0 up, the DataLoader's own")
        self._batches = batches
        self._distance = max(1, num_workers)

    def __iter__(self) -> Iterator[list[int]]:
        """The batches, one after the other."""
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
    """A batch; pickled, it keeps its hint."""

    ahead: Sequence[int] = ()


def ahead_of(batch: Iterable[int]) -> Sequence[int]:
    """The numbers of the batch that comes next in this process, as far as it is known."""
    return batch.ahead if isinstance(batch, _Batch) else ()


def reading_ahead(dataset: Any, batches: Batches, num_workers: int) -> tuple[Any, Batches]:
    """What to give a `DataLoader` in place of a data set and its batches, so that the next one is read ahead.

    A part of a data set that can do so becomes the whole and its numbers there.
    """
    whole, parts = dataset, []
    while type(whole) is Subset:
        parts.append(whole.indices)
        whole = whole.dataset
    if not getattr(whole, "reads_ahead", False):
        return dataset, batches
    return whole, ReadAhead(_Renumbered(batches, parts), num_workers)


class _Renumbered:
    """Batches of a part's numbers as those of the whole, through all parts between."""

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
