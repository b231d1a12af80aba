"""A data loader that a gang of any size goes on with where the last one was. Runs in every rank; all agree unasked."""

from collections.abc import Iterator, Mapping, Sized
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset

from flytekitplugins.daskpytorch.data.read_ahead import reading_ahead
from flytekitplugins.daskpytorch.data.sampling import RankBatches
from flytekitplugins.daskpytorch.documented import documented
from flytekitplugins.daskpytorch.settings import shown

OWN_OPTIONS = ("sampler", "batch_sampler", "generator")


class MapStyle(Sized, Protocol):
    """A data set whose items have numbers."""

    def __getitem__(self, index: int) -> Any:
        """The item with this number."""


@documented
class RankLoader:
    """Gives every rank its batches of any map-style data set, and knows how far the gang has come.

    All ranks together see each item exactly once per epoch, in an order that they draw alike from the seed and share as
    `RankBatches` says. The position is counted in items that the gang was given, not in batches that loader workers
    have fetched ahead. A gang that starts from `state_dict`, be it of another size, goes on with the next item: none
    is lost, none comes twice. A loop over the loader is an epoch, or what is left of it.

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
        """Load with the options of torch's `DataLoader`.

        Args:
            dataset: What to see once per epoch; the same on every rank. `torch.utils.data.Subset` makes a part of one.
            batch_size: As `RankBatches` has it, and so have the next five.
            shuffle: Draw another order in every epoch.
            drop_last: Have batches of exactly this size; what is left over at an epoch's end is not seen in it.
            seed: Of these orders, and of the loader workers' own random numbers, in which the ranks differ.
            rank: Whose batches these are.
            world_size: Of how many.
            options: Such as `num_workers`, `collate_fn` and `pin_memory`; but not those that decide on the order.

        Raises:
            ValueError: There are fewer items than ranks, or than one step takes if what is left is dropped; a number
                is out of range; an option decides on the order; or the items have no numbers.
        """
        if problems := _problems(dataset, options):
            raise ValueError("; ".join(problems))
        self.batch_size = batch_size
        """The most items of one rank per step."""
        self.epoch = 0
        """The epoch that the next batch is of; 0 … at first."""
        self.num_seen = 0
        """How many items of it all ranks together have been given."""
        self.global_batch = torch.empty(0, dtype=torch.int64)
        """The numbers of the items that all ranks together were given last."""
        self.share = self.global_batch
        """This rank's part of these."""
        self._batches = _Given(
            torch.arange(len(dataset)),
            batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            seed=seed,
            rank=rank,
            world_size=world_size,
        )
        self._num_items = len(dataset)
        self._loop = object()
        self._generator = torch.Generator()  # else each epoch would draw from the global one, as dropout does
        source, batches = reading_ahead(dataset, self._batches, options.get("num_workers", 0))
        self._loader: DataLoader[Any] = DataLoader(source, batch_sampler=batches, generator=self._generator, **options)

    @property
    def num_items(self) -> int:
        """Of the data set."""
        return self._num_items

    @property
    def weight(self) -> float:
        """By which to multiply the mean loss of the last batch, so that DDP averages over the items of all ranks alike.

        1 where the ranks' batches are of one size. Only after a restart with more ranks than items are left in the
        epoch, there are ranks without one. Since the others wait for their gradients, these are given an item of
        another rank's, with weight 0.
        """
        return len(self.share) * self._batches.world_size / max(1, len(self.global_batch))

    def __iter__(self) -> Iterator[Any]:
        """The batches that are left of the epoch; then the next epoch is at its beginning.

        Raises:
            RuntimeError: Another loop over the loader has begun meanwhile, or another state was loaded.
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
                    "this loop over a RankLoader cannot go on: another one has begun, or another state was loaded, and "
                    "the position is there now. Leave the loop first, or make a second loader"
                )
        self.epoch, self.num_seen = self.epoch + 1, 0

    def __len__(self) -> int:
        """How many batches are left of the epoch."""
        return self._batches.num_steps(self.num_items - self.num_seen)

    def num_batches_left(self, epochs: int) -> int:
        """How many batches there will be until so many epochs are over."""
        return len(self) + (epochs - self.epoch - 1) * self._batches.num_steps(self.num_items)

    def state_dict(self) -> dict[str, Any]:
        """How far the gang has come: plain numbers, the same on every rank; so rank 0's is enough to keep."""
        return {"epoch": self.epoch, "num_seen": self.num_seen} | self._order()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the next item, with batches of this loader's own size.

        Raises:
            ValueError: The state is that of another order, or no `RankLoader`'s.
        """
        own = self.state_dict()
        if not isinstance(state, Mapping) or not own.keys() <= state.keys():
            raise ValueError(
                f"state={shown(state)} is not what RankLoader.state_dict() returns: it has {', '.join(own)}. Was the "
                "checkpoint saved with another loader?"
            )
        there = self._order()
        if changed := [name for name in there if state[name] != there[name]]:
            raise ValueError(
                f"the state was saved with {', '.join(f'{name}={state[name]}' for name in changed)}, but now there is "
                f"{', '.join(f'{name}={there[name]}' for name in changed)}: another order, in which the position means "
                "nothing. The likely cause is that the data or the seed changed between two starts; give the same "
                "ones, or start from the beginning."
            )
        self._batches.set_epoch(state["epoch"], state["num_seen"])
        self.epoch, self.num_seen, self._loop = state["epoch"], state["num_seen"], object()

    def _order(self) -> dict[str, Any]:
        return {"num_items": self.num_items, "seed": int(self._batches.seed), "shuffle": self._batches.shuffle}


class _Given(RankBatches):
    """What a rank is given: its share, or in place of an empty one an item of another rank's."""

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
