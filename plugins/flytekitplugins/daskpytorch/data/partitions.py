"""Training data that lie in Dask: each partition of a collection is one rank's. Runs in drivers and in ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

from flytekitplugins.daskpytorch.context import current_rank
from flytekitplugins.daskpytorch.protocol.worker_data import Key, WorkerData

if TYPE_CHECKING:
    from distributed import Client, Future


TOLERANCE = 1.1
"""How much more than the average a rank may have before partitions leave the workers where they lie."""


class DaskPartitions:
    """The partitions of a Dask collection, shared by the ranks of a gang on the same cluster.

    Made in the driver and passed to `dispatch.run` or `dispatch.map`; it has the collection computed, waits for that,
    and keeps the partitions on the workers where they are. Each rank takes its `share`, straight from the workers by a
    Dask client of its own: nothing passes through the driver or the scheduler.

    Examples:
        >>> import dask.bag
        >>> from flytekitplugins.daskpytorch import data, dispatch
        >>> def train(names: data.DaskPartitions) -> int:
        ...     return sum(len(partition) for partition in names.share())  # lists of names
        >>> bag = dask.bag.from_sequence(["Bello", "Mia", "Rex", "Luna"] * 25, npartitions=10)
        >>> sum(dispatch.run(client, train, data.DaskPartitions(client, bag)).result())
        100
    """

    def __init__(self, client: Client, collection: Any) -> None:
        """Compute a collection where it is to be trained on.

        Args:
            client: The one that the gang will be run by.
            collection: A bag, array or data frame; or a list of futures, such as `client.map` gives, or of `Delayed`,
                each of which is one partition.

        Raises:
            ValueError: It is no such thing, it has no partitions, or it is of another cluster.
            Exception: Computing it failed: that exception.
        """
        if client.asynchronous:
            raise TypeError("DaskPartitions needs a synchronous client: Client(..., asynchronous=False)")
        self._futures: Sequence[Future] = _computed(client, collection)
        self._keys: tuple[Key, ...] = tuple(future.key for future in self._futures)

    def __len__(self) -> int:
        return len(self._keys)

    def __getstate__(self) -> dict[str, Any]:
        """The ranks' copies know the partitions only by name; the driver's futures keep these alive."""
        return {"_keys": self._keys}

    def share(self) -> Share:
        """This rank's partitions. Every rank must call it, since they agree: each partition is in one share.

        A rank gets what its own Dask worker holds, as far as no rank has far more bytes than the others. After a
        restart partitions are shared out anew.

        Raises:
            RuntimeError: This is no rank that `dispatch` started.
            ValueError: There are fewer partitions than ranks.
        """
        rank = current_rank()
        way: WorkerData | None = rank.link.worker_data
        if way is None:
            raise RuntimeError(
                "no Dask worker here: DaskPartitions.share() works in the ranks of dispatch.run and dispatch.map. "
                "Loader processes get the Share itself."
            )
        if len(self) < rank.world_size:
            raise ValueError(
                f"{len(self)} partitions cannot be shared by {rank.world_size} ranks. Make more of them, as by "
                f"repartition(npartitions={2 * rank.world_size}), or have fewer ranks."
            )
        sizes = way.worker().sizes(self._keys)
        held = _from_all_ranks({number: sizes[key] for number, key in enumerate(self._keys) if key in sizes})
        return Share(self._keys, share_out(len(self), held)[rank.rank], way)


class Share(Sequence[Any]):
    """One rank's partitions. Each is fetched anew when it is asked for, and only that one: keep it, or let it go.

    A worker needs memory for a second, pickled copy of a partition while it hands it out.
    Pickles, so that loader processes may have it, also as the data set of a `DataLoader(..., batch_size=None)`.

    Examples:
        >>> import dask.array
        >>> from torch.utils.data import DataLoader
        >>> from flytekitplugins.daskpytorch import data, dispatch
        >>> def train(rows: data.DaskPartitions) -> list[tuple[int, ...]]:
        ...     share = rows.share()
        ...     return sorted(tuple(block.shape) for block in DataLoader(share, batch_size=None))
        >>> zeros = dask.array.zeros((400, 3), chunks=(100, 3))
        >>> dispatch.run(client, train, data.DaskPartitions(client, zeros)).result()
        [[(100, 3), (100, 3)], [(100, 3), (100, 3)]]
    """

    def __init__(self, keys: Sequence[Key], indices: Sequence[int], way: WorkerData) -> None:
        self.indices = tuple(indices)
        """Which of the collection's partitions these are."""
        self._keys = keys
        self._way = way

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> Share: ...

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return Share(self._keys, self.indices[index], self._way)
        partition = self._way.worker().fetch(self._keys[self.indices[index]])
        current_rank().progress.move()
        return partition

    def __len__(self) -> int:
        return len(self.indices)


def _from_all_ranks(value: Any) -> list[Any]:
    from torch import distributed

    values = [value] * current_rank().world_size
    if len(values) > 1:
        distributed.all_gather_object(values, value)
    return values


def _computed(client: Client, collection: Any) -> list[Future]:
    from distributed import futures_of, wait

    _check_cluster(client, futures_of(collection))
    futures: list[Future] = client.compute(_parts(collection))
    with client.as_current():
        wait(futures)
    for number, future in enumerate(futures):
        if future.status == "error":
            error = future.exception()
            error.add_note(f"in partition {number} of {len(futures)}, which Dask was to make for the training")
            raise error
    return futures


def _parts(collection: Any) -> list[Any]:
    from dask.base import is_dask_collection
    from dask.delayed import Delayed
    from distributed import Future

    if is_dask_collection(collection) and not isinstance(collection, Delayed):
        delayed = collection.to_delayed()
        parts = list(delayed.ravel() if hasattr(delayed, "ravel") else delayed)  # an array's are in an array
    else:
        parts = list(collection) if isinstance(collection, (list, tuple)) else [collection]
    if not parts:
        raise ValueError("the collection has no partitions: there is nothing to train on")
    for part in parts:
        if not isinstance(part, Future) and not is_dask_collection(part):
            raise ValueError(
                f"a {type(part).__name__} is no Dask collection and no future. Make it one, as by "
                "dask.bag.from_sequence(..., npartitions=8), or pass it to the function as it is."
            )
    return parts


def _check_cluster(client: Client, futures: Sequence[Future]) -> None:
    here = client.scheduler.address
    others = {future.client.scheduler.address for future in futures} - {here}
    if others:
        raise ValueError(
            f"the collection lies on the cluster at {', '.join(sorted(others))}, but the gang will run at {here}. Make "
            "it with the client that the gang is run by, or let it travel through storage."
        )


# ---- Which rank gets which: all agree, since all have the same answers


@dataclass
class _Rank:
    partitions: list[int] = field(default_factory=list)
    load: int = 0


def share_out(num_partitions: int, held: Sequence[Mapping[int, int]]) -> list[list[int]]:
    """Give every partition to one rank: where it lies, unless that rank would have far more bytes than others.

    Args:
        num_partitions: They are called 0, 1, ...
        held: For each rank, the partitions that its worker holds, and their bytes.

    Returns:
        For each rank, its partitions, ascending. None goes without where there are as many partitions as ranks.
    """
    sizes = _sizes(num_partitions, held)
    ranks = [_Rank() for _ in held]
    # The largest first, so that small ones fill the gaps; among equals by their numbers.
    for partition in sorted(range(num_partitions), key=lambda number: (-sizes[number], number)):
        holders = [rank for rank, has in zip(ranks, held, strict=True) if partition in has]
        _give(partition, sizes, min(holders or ranks, key=lambda rank: rank.load))
    _level(ranks, sizes)
    return [sorted(rank.partitions) for rank in ranks]


def _sizes(num_partitions: int, held: Sequence[Mapping[int, int]]) -> list[int]:
    """Bytes of each partition, at least 1; the average for those that nobody here holds."""
    known: dict[int, int] = {}
    for has in held:
        for partition, size in has.items():
            known[partition] = max(size, known.get(partition, 1))
    average = sum(known.values()) // len(known) if known else 1
    return [known.get(partition, average) for partition in range(num_partitions)]


def _level(ranks: Sequence[_Rank], sizes: Sequence[int]) -> None:
    """Move partitions from the rank with most bytes to that with least, while it has more than the tolerance.

    A rank without any gets one in any case. A rank's last partition stays.
    """
    average = sum(sizes) / len(ranks)
    while richer := [rank for rank in ranks if len(rank.partitions) > 1]:
        most, least = max(richer, key=lambda rank: rank.load), min(ranks, key=lambda rank: rank.load)
        gap = most.load - least.load
        # Half the gap would make both equal; all of it, or more, only changes their places.
        movable = [partition for partition in most.partitions if sizes[partition] < gap]
        if not movable or (most.load <= TOLERANCE * average and least.partitions):
            return
        partition = min(movable, key=lambda partition: (abs(gap - 2 * sizes[partition]), -partition))
        most.partitions.remove(partition)
        most.load -= sizes[partition]
        _give(partition, sizes, least)


def _give(partition: int, sizes: Sequence[int], rank: _Rank) -> None:
    rank.partitions.append(partition)
    rank.load += sizes[partition]
