"""Shares of a dataset for each rank, a data loader whose position is saved in checkpoints, and batches named ahead.

Runs in every rank. Loader workers take turns, so a worker's next batch comes as many batches later as there are
workers.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from numbers import Integral, Real
from types import SimpleNamespace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler, Subset

from flytekitplugins.daskpytorch.checks import Problems, Rule, must_be, shown
from flytekitplugins.daskpytorch.context import current_rank


def _whole(allowed: range, words: str) -> Rule:
    def is_allowed(value: Any) -> bool:
        return isinstance(value, Integral) and not isinstance(value, bool) and int(value) in allowed

    return must_be(words, is_allowed)


SEED = _whole(range(-(2**63), 2**63), "a whole number of at most 63 bits")
"""torch accepts seeds up to 2**64 - 1, so an epoch number can be added to each of these."""
COUNT = _whole(range(1, 2**63), "a whole number from 1 up")
SHARE = must_be("a share above 0 and below 1", lambda value: isinstance(value, Real) and 0 < float(value) < 1)


class Labelled(Protocol):
    @property
    def targets(self) -> Sequence[int]:
        pass


def split_by_class(
    dataset: Labelled | Sequence[int], held_out: float = 0.2, seed: int = 0, *, contents: Sequence[str] | None = None
) -> tuple[list[int], list[int]]:
    """Split a dataset into training and held-out items, with the same share of every class.

    Every process with the same arguments makes the same split. Equal items are on one side, also across classes, so
    that no picture is both trained on and tested on.

    Args:
        dataset: A dataset with `targets`, the label of each item. Or the labels themselves.
        held_out: The share of each class to hold out, above 0 and below 1. Rounded to whole items.
        seed: A whole number. Another seed gives another split.
        contents: One string per item, such as a checksum. Items with the same string are equal. None: the dataset's
            `etags`. Without those, no two items are equal.

    Returns:
        The indices to train on and the held-out indices, both ascending. Each index is in one of the lists.

    Raises:
        ValueError: The share or the seed is out of range, the lengths differ, or one side would be empty.

    Examples:
        >>> from flytekitplugins.daskpytorch import data
        >>> labels = [0] * 10 + [1] * 5
        >>> train, held_out = data.split_by_class(labels, held_out=0.2)
        >>> len(train), len(held_out), [labels[index] for index in held_out]
        (12, 3, [0, 0, 1])
    """
    labels = list(dataset if isinstance(dataset, Sequence) else dataset.targets)
    if contents is None:
        contents = getattr(dataset, "etags", None) or [str(index) for index in range(len(labels))]
    values = SimpleNamespace(held_out=held_out, seed=seed, contents=contents)
    problems = Problems("split_by_class", values, {"held_out": SHARE, "seed": SEED})
    problems.unless(len(contents) == len(labels), "contents", f"one text for each of {len(labels)} items")
    problems.raise_any()
    if not labels:
        raise ValueError("there is nothing to split: the data set is empty")
    of_class: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for label, content in zip(labels, contents, strict=True):
        of_class[label][content] += 1
    is_held_out: dict[str, bool] = {}
    for _, own in sorted(of_class.items()):
        wanted = round(held_out * own.total()) - sum(own[content] for content in own if is_held_out.get(content))
        # Hashes in place of random numbers: items that are added to a class later move few others to the other side.
        for content in sorted(own.keys() - is_held_out, key=lambda content: _hash(seed, content)):
            is_held_out[content] = own[content] <= wanted
            wanted -= own[content] * is_held_out[content]
    sides: tuple[list[int], list[int]] = ([], [])
    for index, content in enumerate(contents):
        sides[is_held_out[content]].append(index)
    if not all(sides):
        raise ValueError(
            f"held_out={held_out} of {len(labels)} items in {len(of_class)} classes leaves nothing to "
            f"{'test' if sides[0] else 'train'} on: the largest class has "
            f"{max(own.total() for own in of_class.values())} items. "
            f"{'Raise' if sides[0] else 'Lower'} held_out, or give more items"
        )
    return sides


def _hash(seed: int, content: str) -> bytes:
    return hashlib.sha256(f"{seed} {content}".encode()).digest()


def _place() -> tuple[int, int]:
    own = current_rank()
    if own.world_size == 1 and dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return own.rank, own.world_size


RULES = {
    **dict.fromkeys(
        ("sampler", "batch_sampler", "generator"),
        must_be("left out, since the loader shares the items out itself", lambda _: False),
    ),
    "in_order": must_be(
        "True, else nobody could tell which items the gang was given", lambda value: value is not False
    ),
    "dataset": must_be(
        "map-style, with a length and with items that have numbers",
        lambda value: hasattr(value, "__len__") and not isinstance(value, IterableDataset),
    ),
    "batch_size": COUNT,
    "seed": SEED,
    "world_size": COUNT,
}


class MapStyle(Sized, Protocol):
    """Type of a dataset with a length, whose items are read by index."""

    def __getitem__(self, index: int) -> Any:
        pass


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
            rank: None: the current rank.
            world_size: None: the number of ranks in the current gang, or in another launcher's process group.
            options: Options of `DataLoader`, such as `num_workers`, `collate_fn` and `pin_memory`. Options that decide
                on the order are refused.

        Raises:
            ValueError: There are fewer items than ranks, or, with `drop_last`, than one step takes. A number is out of
                range, an option decides on the order, or the dataset has no indices.
        """
        own_rank, own_world_size = _place()
        self._rank = rank = own_rank if rank is None else rank
        self._world_size = world_size = own_world_size if world_size is None else world_size
        values = {"dataset": dataset, "batch_size": batch_size, "seed": seed, "rank": rank, "world_size": world_size}
        problems = Problems("RankLoader", SimpleNamespace(**values, **options), RULES)
        problems.raise_any()
        self._seed, self._shuffle, self._drop_last = seed, shuffle, drop_last
        self.num_items = len(dataset)
        self.batch_size = batch_size
        """Maximum number of items of one rank per step."""
        self.epoch = 0
        """Epoch of the next batch, counted from 0."""
        self.num_seen = 0
        """Number of items of the current epoch that all ranks together have received."""
        self.global_batch = torch.empty(0, dtype=torch.int64)
        """Indices of the items that all ranks together got in the last step: int64, one dimension."""
        self.share = self.global_batch
        """This rank's part of `global_batch`."""
        self._check(problems)
        self._loop = object()
        self._generator = torch.Generator()  # else each epoch would draw from the global one, as dropout does
        source, numbers = numbers_in_whole(dataset)
        self._batches = _BatchesOfRank(self._rank, self._world_size, numbers)
        batches: Batches = self._batches if numbers is None else ReadAhead(self._batches, options.get("num_workers", 0))
        self._loader: DataLoader[Any] = DataLoader(source, batch_sampler=batches, generator=self._generator, **options)

    def _check(self, problems: Problems) -> None:
        here = f"a whole number from 0 and below world_size={self._world_size}"
        problems.check("rank", _whole(range(self._world_size), here))
        problems.raise_any()
        if self.num_items < self._world_size:
            raise ValueError(
                f"{self.num_items} items cannot be shared by {self._world_size} ranks, each of which needs one: give "
                "more items, or use fewer ranks"
            )
        if self._drop_last and not self._num_steps(self.num_items):
            raise ValueError(
                f"drop_last=True leaves nothing: one step takes {self.batch_size * self._world_size} items, batch_size="
                f"{self.batch_size} on each of {self._world_size} ranks, but there are {self.num_items}"
            )

    @property
    def weight(self) -> float:
        """Factor by which to multiply the last batch's mean loss, so that all items of all ranks count alike under DDP.

        1 if the batches of all ranks have the same size. After a restart, fewer items than ranks may be left. A rank
        without an item then gets another rank's, with weight 0, because the other ranks wait for its gradients.
        """
        return len(self.share) * self._world_size / max(1, len(self.global_batch))

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's remaining batches of the epoch. After the last one, the next epoch begins.

        Raises:
            RuntimeError: During this loop, another loop over the loader has begun, or a state was loaded.
        """
        self._loop = loop = object()
        self._batches.steps = self._steps()
        self._generator.manual_seed(hash((self._seed, self.epoch, self.num_seen, self._rank)))
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
        return self._num_steps(self.num_items - self.num_seen)

    def num_batches_left(self, epochs: int) -> int:
        """Return the number of remaining batches of a training that has `epochs` epochs in total."""
        return len(self) + (epochs - self.epoch - 1) * self._num_steps(self.num_items)

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
        self.epoch, self.num_seen, self._loop = state["epoch"], state["num_seen"], object()

    def _order(self) -> dict[str, Any]:
        return {"num_items": self.num_items, "seed": int(self._seed), "shuffle": self._shuffle}

    def _steps(self) -> Sequence[Tensor]:
        rest = torch.arange(self.num_items)
        if self._shuffle:
            rest = torch.randperm(self.num_items, generator=torch.Generator().manual_seed(self._seed + self.epoch))
        rest = rest[self.num_seen :]
        num_steps = self._num_steps(len(rest))
        if self._drop_last:
            rest = rest[: num_steps * self.batch_size * self._world_size]
        return rest.tensor_split(num_steps) if num_steps else ()

    def _num_steps(self, num_items: int) -> int:
        full, left = divmod(num_items, self.batch_size * self._world_size)
        if self._drop_last:
            return full
        return min(full + bool(left), max(1, num_items // self._world_size))  # no rank goes without


class _BatchesOfRank(Sampler[list[int]]):
    def __init__(self, rank: int, world_size: int, numbers: Sequence[int] | None) -> None:
        self._rank, self._world_size, self._numbers = rank, world_size, numbers
        self.steps: Sequence[Tensor] = ()
        """Indices of the items that all ranks together get, for each remaining step of the epoch."""

    def share_of(self, step: Tensor) -> Tensor:
        return step.tensor_split(self._world_size)[self._rank]

    def __iter__(self) -> Iterator[list[int]]:
        for step in self.steps:
            batch = self.share_of(step).tolist() or step[:1].tolist()
            yield batch if self._numbers is None else [self._numbers[index] for index in batch]

    def __len__(self) -> int:
        return len(self.steps)


# ---- The next batch


class Batches(Sized, Iterable[list[int]], Protocol):
    """Type of a batch sampler: an iterable of lists of indices, with a length, such as torch's `BatchSampler`."""


class ReadAhead(Sampler[list[int]]):
    """Batch sampler that adds to each batch the indices of the next one, so that `S3ImageFolder` can read it ahead.

    The batches are those of another batch sampler. Use `DataLoader(batch_sampler=ReadAhead(...))`. A `RankLoader` reads
    ahead without `ReadAhead`. torch's `Subset` loses the indices of the next batch: let the sampler choose among the
    indices of the whole dataset instead. `ReadAhead` takes as many batches in advance from the other sampler as the
    `DataLoader` has workers.

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
        """
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
    """Batch with the next batch's indices, as `ahead`, which pickles keep."""

    ahead: Sequence[int] = ()


def ahead_of(batch: Iterable[int]) -> Sequence[int]:
    return batch.ahead if isinstance(batch, _Batch) else ()


def numbers_in_whole(dataset: Any) -> tuple[Any, Sequence[int] | None]:
    """Return the dataset below `Subset`s that can read ahead, and there the index of each item.

    A dataset that cannot read ahead is returned unchanged, with None.
    """
    if type(dataset) is not Subset:
        return dataset, range(len(dataset)) if getattr(dataset, "reads_ahead", False) else None
    whole, numbers = numbers_in_whole(dataset.dataset)
    return (dataset, None) if numbers is None else (whole, [numbers[index] for index in dataset.indices])
