"""A data loader whose position is saved in checkpoints, and a sampler that names the next batch ahead.

Runs in every rank. The position holds for gangs of any size.

A `DataLoader` asks a dataset for one batch at a time, and only the sampler knows the next one. Loader workers take
turns, so the next batch of a worker comes as many batches later as there are workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, Subset

from flytekitplugins.daskpytorch.checks import shown
from flytekitplugins.daskpytorch.data.sampling import RankBatches

OWN_OPTIONS = ("sampler", "batch_sampler", "generator")


class MapStyle(Sized, Protocol):
    """Type of a dataset with a length, whose items are read by index."""

    def __getitem__(self, index: int) -> Any:
        """Return the item with this index."""


class RankLoader:
    """Data loader that gives each rank its batches, and keeps the gang's position in the dataset for checkpoints.

    All ranks together see each item exactly once per epoch, unless `drop_last` leaves out the last ones. The order
    depends on the seed and the epoch alone. In one step, the sizes of the ranks' batches differ by one item at most.
    The position is the number of items that all ranks have received. Batches that DataLoader workers fetched ahead do
    not count. A gang that starts from `state_dict` goes on with the next item, also with another number of ranks. A
    loop over the loader is one epoch, or the rest of one.

    Examples:
        >>> from flytekitplugins.daskpytorch import current_rank, data
        >>> rank = current_rank()
        >>> loader = data.RankLoader(range(100), batch_size=20)  # and DataLoader's options, such as num_workers=2
        >>> if (state := rank.checkpoint.load()) is not None:
        ...     loader.load_state_dict(state["loader"])
        >>> while loader.epoch < 2:
        ...     for step, batch in enumerate(loader):
        ...         loss = batch.float().mean() * loader.weight
        ...         rank.checkpoint.save({"loader": loader.state_dict()}, step)
        ...     print(f"{loader.epoch} epochs, {step + 1} batches")
        1 epochs, 5 batches
        2 epochs, 5 batches
    """

    def __init__(
        self,
        dataset: MapStyle,
        batch_size: int,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        **options: Any,
    ) -> None:
        """Make the loader. `options` are those of torch's `DataLoader`.

        Args:
            dataset: The dataset, the same on every rank. `torch.utils.data.Subset` makes a part of a dataset.
            batch_size: Maximum number of items of one rank per step.
            shuffle: True: draw another order in every epoch. False: keep the dataset's order.
            drop_last: True: all batches have exactly `batch_size` items. The rest of an epoch's items is then left out.
            seed: Seed of the orders, and of the DataLoader workers' random numbers, which differ from rank to rank.
            rank: The rank that gets the batches. None: the current rank.
            world_size: The number of ranks. None: the number of ranks in the current gang.
            options: Options of `DataLoader`, such as `num_workers`, `collate_fn` and `pin_memory`. Options that decide
                on the order are refused.

        Raises:
            ValueError: There are fewer items than ranks. With `drop_last`, there are fewer items than one step takes. A
                number is out of range, an option decides on the order, or the dataset has no indices.
        """
        if problems := _problems(dataset, options):
            raise ValueError("; ".join(problems))
        self.batch_size = batch_size
        """Maximum number of items of one rank per step."""
        self.epoch = 0
        """Epoch of the next batch, counted from 0."""
        self.num_seen = 0
        """Number of items of the current epoch that all ranks together have received."""
        self.global_batch = torch.empty(0, dtype=torch.int64)
        """Indices of the items that all ranks together got in the last step: a one-dimensional tensor of int64."""
        self.share = self.global_batch
        """Indices of the items that this rank got in the last step: a one-dimensional tensor of int64."""
        self._batches = _BatchesOfRank(
            torch.arange(len(dataset)),
            batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            seed=seed,
            rank=rank,
            world_size=world_size,
        )
        self.num_items = len(dataset)
        """Number of items of the dataset."""
        self._loop = object()
        self._generator = torch.Generator()  # else each epoch would draw from the global one, as dropout does
        source, batches = reading_ahead(dataset, self._batches, options.get("num_workers", 0))
        self._loader: DataLoader[Any] = DataLoader(source, batch_sampler=batches, generator=self._generator, **options)

    @property
    def weight(self) -> float:
        """Factor by which to multiply the last batch's mean loss, so that all items of all ranks count alike under DDP.

        The factor is 1 if the batches of all ranks have the same size. After a restart, the epoch may have fewer items
        left than there are ranks. A rank without an item then gets an item of another rank, with weight 0, because the
        other ranks wait for its gradients.
        """
        return len(self.share) * self._batches.world_size / max(1, len(self.global_batch))

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's remaining batches of the epoch. After the last one, the next epoch begins.

        Raises:
            RuntimeError: During this loop, another loop over the loader has begun, or a state was loaded.
        """
        self._loop = loop = object()
        self._batches.set_epoch(self.epoch, self.num_seen)
        self._generator.manual_seed(hash((self._batches.seed, self.epoch, self.num_seen, self._batches.rank)))
        for step, batch in zip(self._batches.steps, self._loader, strict=True):
            self.global_batch, self.share = step, self._batches.share_of(step)
            self.num_seen += len(step)
            yield batch
            if self._loop is not loop:  # whose items would come twice
                raise RuntimeError(
                    "this loop over a RankLoader cannot go on, because another loop over the same RankLoader has "
                    "begun, or load_state_dict() was called. End the first loop before, or make a second RankLoader"
                )
        self.epoch, self.num_seen = self.epoch + 1, 0

    def __len__(self) -> int:
        """Return the number of batches that remain in the current epoch."""
        return self._batches.num_steps(self.num_items - self.num_seen)

    def num_batches_left(self, epochs: int) -> int:
        """Return the number of remaining batches of a training that has `epochs` epochs in total."""
        return len(self) + (epochs - self.epoch - 1) * self._batches.num_steps(self.num_items)

    def state_dict(self) -> dict[str, Any]:
        """Return the gang's position in the dataset, as plain numbers. All ranks return the same."""
        return {"epoch": self.epoch, "num_seen": self.num_seen} | self._order()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position that `state_dict` returned earlier, also in a gang of another size.

        The batch size may differ from the earlier one.

        Raises:
            ValueError: The state belongs to another order of the items, or is not from a `RankLoader`.
        """
        own = self.state_dict()
        if not isinstance(state, Mapping) or not own.keys() <= state.keys():
            raise ValueError(
                f"state={shown(state)} is not what RankLoader.state_dict() returns: a dictionary with "
                f"{', '.join(own)}. Was the checkpoint saved with another loader?"
            )
        there = self._order()
        if changed := [name for name in there if state[name] != there[name]]:
            raise ValueError(
                f"the state was saved with {', '.join(f'{name}={state[name]}' for name in changed)}, but now there is "
                f"{', '.join(f'{name}={there[name]}' for name in changed)}: the order of the items differs, so the "
                "saved position is of no use. The likely cause is that the data or the seed changed between two "
                "starts; give the same ones, or start from the beginning."
            )
        self._batches.set_epoch(state["epoch"], state["num_seen"])
        self.epoch, self.num_seen, self._loop = state["epoch"], state["num_seen"], object()

    def _order(self) -> dict[str, Any]:
        return {"num_items": self.num_items, "seed": int(self._batches.seed), "shuffle": self._batches.shuffle}


class _BatchesOfRank(RankBatches):
    """Batches of one rank, none of them empty: an empty batch is replaced by an item of another rank."""

    _owner = "RankLoader"

    def __iter__(self) -> Iterator[list[int]]:
        for step, share in zip(self.steps, super().__iter__(), strict=True):
            yield share or step[:1].tolist()


def _problems(dataset: object, options: Mapping[str, Any]) -> list[str]:
    given = [name for name in OWN_OPTIONS if name in options]
    problems = [
        f"{name}={shown(options[name])}: leave it out, the loader shares the items out itself" for name in given
    ]
    if options.get("in_order") is False:
        problems.append("in_order=False: must be True, else nobody could tell which items the gang was given")
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        problems.append(f"dataset={shown(dataset)}: must be map-style, with a length and with items that have numbers")
    return problems


# ---- The next batch


class Batches(Protocol):
    """Type of a batch sampler: an iterable of lists of indices, with a length, such as torch's `BatchSampler`."""

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of each batch."""

    def __len__(self) -> int:
        """Return the number of batches."""


class ReadAhead(Sampler[list[int]]):
    """Batch sampler that adds to each batch the indices of the next one, so that `S3ImageFolder` can read it ahead.

    The batches are those of another batch sampler. Use `DataLoader(batch_sampler=ReadAhead(...))`. A `RankLoader` reads
    ahead without `ReadAhead`. Other datasets get a batch as a plain list. torch's `Subset` loses the indices of the
    next batch: let the sampler choose among the indices of the whole dataset instead. `ReadAhead` takes as many batches
    in advance from the other sampler as the `DataLoader` has workers.

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
        """Make a sampler with the batches of another batch sampler.

        Args:
            batches: The other batch sampler.
            num_workers: The `num_workers` of the `DataLoader`. With another number, pictures are read ahead in vain.

        Raises:
            ValueError: `num_workers` is below 0.
        """
        if num_workers < 0:
            raise ValueError(f"num_workers={num_workers}: must be a whole number from 0 up, the DataLoader's own")
        self._batches = batches
        self._distance = max(1, num_workers)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of the other sampler in their order, each with the next batch's indices."""
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
    """Batch of indices that also has the next batch's indices, as `ahead`. Pickles keep `ahead`."""

    ahead: Sequence[int] = ()


def ahead_of(batch: Iterable[int]) -> Sequence[int]:
    """Return the indices of the batch that this process loads after `batch`. Empty if they are not known."""
    return batch.ahead if isinstance(batch, _Batch) else ()


def reading_ahead(dataset: Any, batches: Batches, num_workers: int) -> tuple[Any, Batches]:
    """Return the dataset and the batch sampler with which a `DataLoader` reads the next batch ahead.

    A `Subset` of a dataset that can read ahead becomes the whole dataset, and the batches get indices of the whole. A
    dataset that cannot read ahead is returned unchanged, with its batches.

    Args:
        dataset: Dataset or `Subset` of the user.
        batches: Batch sampler of the dataset.
        num_workers: Number of the `DataLoader`'s worker processes.
    """
    whole, parts = dataset, []
    while type(whole) is Subset:
        parts.append(whole.indices)
        whole = whole.dataset
    if not getattr(whole, "reads_ahead", False):
        return dataset, batches
    return whole, ReadAhead(_Renumbered(batches, parts), num_workers)


class _Renumbered:
    """Batch sampler that turns indices of a `Subset`, also of nested ones, into indices of the whole dataset."""

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
