"""Splits a dataset into training and held-out items, and shares items out to ranks. Runs in every rank."""

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from numbers import Integral, Real
from types import SimpleNamespace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Sampler

from flytekitplugins.daskpytorch.checks import Problems, Rule, must_be
from flytekitplugins.daskpytorch.context import current_rank


def _whole(allowed: range, words: str) -> Rule:
    def is_allowed(value: Any) -> bool:
        return isinstance(value, Integral) and not isinstance(value, bool) and int(value) in allowed

    return must_be(words, is_allowed)


SEED = _whole(range(-(2**63), 2**63), "a whole number of at most 63 bits")
"""Rule for seeds. torch accepts seeds up to 2**64 - 1, so an epoch number can be added to each of these."""
COUNT = _whole(range(1, 2**63), "a whole number from 1 up")
SHARE = must_be("a share above 0 and below 1", lambda value: isinstance(value, Real) and 0 < float(value) < 1)


class Labelled(Protocol):
    """Type of a dataset that has the label of each item, such as torchvision's `ImageFolder`."""

    @property
    def targets(self) -> Sequence[int]:
        """Label of each item, in the order of the items."""


def split_by_class(
    dataset: Labelled | Sequence[int],
    held_out: float = 0.2,
    seed: int = 0,
    *,
    contents: Sequence[str] | None = None,
) -> tuple[list[int], list[int]]:
    """Split a dataset into training and held-out items, with the same share of every class.

    Every process with the same arguments makes the same split. Equal items are on one side, also if they are in several
    classes, so that no picture is both trained on and tested on.

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
    by_class: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for index, (label, content) in enumerate(zip(labels, contents, strict=True)):
        by_class[label][content].append(index)
    is_held_out: dict[str, bool] = {}
    for _, equal_items in sorted(by_class.items()):
        _choose(equal_items, held_out, seed, is_held_out)
    sides: tuple[list[int], list[int]] = ([], [])
    for index, content in enumerate(contents):
        sides[is_held_out[content]].append(index)
    if not all(sides):
        raise ValueError(
            f"held_out={held_out} of {len(labels)} items in {len(by_class)} classes leaves nothing to "
            f"{'test' if sides[0] else 'train'} on: the largest class has "
            f"{max(sum(map(len, equal.values())) for equal in by_class.values())} items. "
            f"{'Raise' if sides[0] else 'Lower'} held_out, or give more items"
        )
    return sides


def _choose(equal_items: dict[str, list[int]], held_out: float, seed: int, is_held_out: dict[str, bool]) -> None:
    """Decide which contents of one class are held out, and note the decisions in `is_held_out`.

    Args:
        equal_items: Indices of the class's items, by their content. Items of equal content stay together.
        held_out: The share of the class's items to hold out.
        seed: Seed of the decisions.
        is_held_out: Decisions on the contents of earlier classes, which stand.
    """
    wanted = round(held_out * sum(map(len, equal_items.values())))
    wanted -= sum(len(indices) for content, indices in equal_items.items() if is_held_out.get(content))
    # Hashes in place of random numbers: items that are added to a class later move few others to the other side.
    for content in sorted(equal_items.keys() - is_held_out, key=lambda content: _hash(seed, content)):
        is_held_out[content] = len(equal_items[content]) <= wanted
        wanted -= len(equal_items[content]) * is_held_out[content]


def _hash(seed: int, content: str) -> bytes:
    return hashlib.sha256(f"{seed} {content}".encode()).digest()


class RankBatches(Sampler[list[int]]):
    """Batch sampler that gives each rank its batches. All ranks together see each index exactly once per epoch.

    Use `DataLoader(batch_sampler=RankBatches(...))`. A `RankLoader` is both in one, and also keeps the position for
    checkpoints. All ranks take the same number of steps, and the sizes of their batches differ by one item at most.
    Unlike `DistributedSampler`, `RankBatches` repeats or drops no item. Weight the loss, since DDP averages over ranks:
    `loss * len(batch) * world_size / len(batches.steps[step])`, where `loss` is the mean of the rank's batch.

    Examples:
        >>> from flytekitplugins.daskpytorch import data
        >>> of_ranks = [data.RankBatches(range(10), 3, shuffle=False, rank=rank, world_size=2) for rank in range(2)]
        >>> list(of_ranks[0])
        [[0, 1, 2], [5, 6, 7]]
        >>> list(of_ranks[1])
        [[3, 4], [8, 9]]
    """

    _owner = "RankBatches"

    def __init__(
        self,
        indices: Sequence[int] | Tensor,
        batch_size: int,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """Divide the indices among the ranks.

        Args:
            indices: The indices of one epoch, such as one side of `split_by_class`. The same on every rank.
            batch_size: Maximum number of items of one rank per step. A step may have one item more if a rank would
                else have none.
            shuffle: True: draw another order in every epoch. False: keep the given order.
            drop_last: True: all batches have exactly `batch_size` items. The rest of an epoch's items is then left out.
            seed: Seed of the orders, a whole number.
            rank: The rank that gets the batches. None: the current rank.
            world_size: The number of ranks. None: the number of ranks in the current gang, or in the process group that
                another launcher, such as torchrun, formed.

        Raises:
            ValueError: There are fewer indices than ranks. With `drop_last`, there are fewer indices than one step
                takes. A number is out of range.
        """
        self._indices = torch.as_tensor(indices, dtype=torch.int64)
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.seed = seed
        own_rank, own_world_size = _place()
        self.rank = own_rank if rank is None else rank
        self.world_size = own_world_size if world_size is None else world_size
        problems = Problems(self._owner, self, {"batch_size": COUNT, "seed": SEED, "world_size": COUNT})
        problems.raise_any()
        here = f"a whole number from 0 and below world_size={self.world_size}"
        problems.check("rank", _whole(range(self.world_size), here))
        problems.raise_any()
        if (num_items := len(self._indices)) < self.world_size:
            raise ValueError(
                f"{num_items} items cannot be shared by {self.world_size} ranks, each of which needs one: give more "
                "items, or use fewer ranks"
            )
        if drop_last and not self.num_steps(num_items):
            raise ValueError(
                f"drop_last=True leaves nothing: one step takes {batch_size * self.world_size} items, batch_size="
                f"{batch_size} on each of {self.world_size} ranks, but there are {num_items}"
            )
        self.set_epoch(0)

    def set_epoch(self, epoch: int, num_seen: int = 0) -> None:
        """Go to the beginning or the middle of an epoch: iteration then yields the rest of the epoch's batches.

        Args:
            epoch: The epoch, from 0 up. With the seed, the epoch determines the order of the items.
            num_seen: The number of items of the epoch that all ranks together have seen. The number of ranks may have
                been another then. If fewer items than ranks are left, some ranks get an empty batch.

        Raises:
            ValueError: `epoch` is below 0, or `num_seen` is not from 0 to the number of items.
        """
        most = len(self._indices)
        rules = {
            "epoch": _whole(range(2**63), "a whole number from 0 up"),
            "num_seen": _whole(range(most + 1), f"a whole number from 0 to {most}"),
        }
        Problems(self._owner, SimpleNamespace(epoch=epoch, num_seen=num_seen), rules).raise_any()
        rest = self._order(epoch)[num_seen:]
        num_steps = self.num_steps(len(rest))
        if self.drop_last:
            rest = rest[: num_steps * self.batch_size * self.world_size]
        self.steps: Sequence[Tensor] = rest.tensor_split(num_steps) if num_steps else ()
        """Indices of the items that all ranks together get, for each remaining step of the epoch."""

    def num_steps(self, num_items: int) -> int:
        """Return the number of steps in which all ranks together see `num_items` items."""
        full, left = divmod(num_items, self.batch_size * self.world_size)
        if self.drop_last:
            return full
        return min(full + bool(left), max(1, num_items // self.world_size))  # no rank goes without

    def share_of(self, step: Tensor) -> Tensor:
        """Return this rank's part of the indices that all ranks together get in a step."""
        return step.tensor_split(self.world_size)[self.rank]

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's batch of indices for each remaining step of the epoch."""
        for step in self.steps:
            yield self.share_of(step).tolist()

    def __len__(self) -> int:
        return len(self.steps)

    def _order(self, epoch: int) -> Tensor:
        if not self.shuffle:
            return self._indices
        generator = torch.Generator().manual_seed(self.seed + epoch)
        return self._indices[torch.randperm(len(self._indices), generator=generator)]


def _place() -> tuple[int, int]:
    """Return this process's rank and the number of ranks, in the gang or else in torch's process group."""
    own = current_rank()
    if own.world_size == 1 and dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return own.rank, own.world_size
