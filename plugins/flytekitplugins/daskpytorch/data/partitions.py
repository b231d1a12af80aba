"""Training data in Dask collections, whose partitions are divided among the ranks. Runs in drivers and in ranks."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flytekitplugins.daskpytorch.context import current_rank
from flytekitplugins.daskpytorch.rank.sharded import gathered

if TYPE_CHECKING:
    from distributed import Client, Future, Scheduler

    from flytekitplugins.daskpytorch.protocol.job import Key, WorkerData


POLL_INTERVAL = 0.2


class DaskPartitions:
    """Partitions of a Dask collection, divided among the ranks of a gang on the same cluster.

    Pass the object to `dispatch.run` or `dispatch.map`. The constructor computes the collection, waits for the result,
    and keeps the partitions on their workers. Each rank calls `share`, and fetches its partitions from the workers, or
    through the scheduler if the workers are threads of one process. Partitions do not pass through the driver.

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
        """Compute a Dask collection on the cluster.

        Args:
            client: Synchronous Dask client with which the gang will be run.
            collection: Bag, array or data frame. Or a list with a future or a `Delayed` per partition, for example from
                `client.map`.

        Raises:
            TypeError: The client is asynchronous.
            ValueError: The collection has another type, no partitions, or belongs to another cluster.
            Exception: The exception of the computation.
        """
        if client.asynchronous:
            raise TypeError("DaskPartitions needs a synchronous client: Client(..., asynchronous=False)")
        self._futures: Sequence[Future] = _computed(client, collection)
        self._keys: tuple[Key, ...] = tuple(future.key for future in self._futures)
        self._scheduler = address_for_ranks(client)

    def __len__(self) -> int:
        return len(self._keys)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle only the partitions' Dask keys. The futures stay in the driver, and keep the partitions alive."""
        return {"_keys": self._keys, "_scheduler": self._scheduler}

    def share(self) -> Share:
        """Return this rank's partitions. All ranks must call `share` together. Each partition is in one share.

        A rank gets partitions of its own Dask worker, unless the rank would have more partitions than others. A
        restarted gang divides the partitions anew.

        Raises:
            RuntimeError: The process is not a rank of `dispatch.run` or `dispatch.map`.
            ValueError: The collection has fewer partitions than the gang has ranks.
        """
        rank = current_rank()
        if rank.link.worker_data is None:
            raise RuntimeError(
                "no Dask worker here: DaskPartitions.share() works in the ranks of dispatch.run and dispatch.map. "
                "Loader processes get the Share itself."
            )
        if len(self) < rank.world_size:
            raise ValueError(
                f"{len(self)} partitions cannot be shared by {rank.world_size} ranks. Make more of them, as by "
                f"repartition(npartitions={2 * rank.world_size}), or have fewer ranks."
            )
        way = way_to_dask(self._scheduler)
        client = client_in_rank(way)
        holders = client.sync(client.scheduler.who_has, keys=self._keys)
        held = gathered({number for number, key in enumerate(self._keys) if way.worker in holders[key]})
        return Share(self._keys, share_out(len(self), held)[rank.rank], way)


class Share(Sequence[Any]):
    """Sequence of a rank's partitions. Each access fetches the partition again from a Dask worker.

    Keep a partition that you need twice. A worker that sends a partition needs memory for a second, pickled copy. A
    `Share` can be pickled, so that a `DataLoader(..., batch_size=None)` with worker processes may have it as data set.

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
        """Index in the Dask collection, from 0 up, of each partition."""
        self._keys = keys
        self._way = way

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return Share(self._keys, self.indices[index], self._way)
        partition = _fetch(self._way, self._keys[self.indices[index]])
        current_rank().progress.move()
        return partition

    def __len__(self) -> int:
        return len(self.indices)


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
        parts = list(delayed.ravel() if hasattr(delayed, "ravel") else delayed)  # arrays return an array of `Delayed`
    else:
        parts = list(collection) if isinstance(collection, (list, tuple)) else [collection]
    if not parts:
        raise ValueError("the collection has no partitions to train on: give at least one partition for each rank")
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


# ---- The rank's own Dask client


def address_for_ranks(client: Client) -> str | None:
    """Return the scheduler's address for ranks, if workers are threads of this process. Else workers know it."""
    address: str | None = client.run_on_scheduler(_listen) if client.scheduler.address.startswith("inproc:") else None
    return address


async def _listen(dask_scheduler: Scheduler) -> str:
    if len(dask_scheduler.listeners) == 1:
        await dask_scheduler.listen("tcp://127.0.0.1:0", **dask_scheduler.security.get_listen_args("scheduler"))
    return str(dask_scheduler.listeners[-1].contact_address)


def way_to_dask(scheduler: str | None) -> WorkerData:
    way: WorkerData = current_rank().link.worker_data
    return replace(way, scheduler=scheduler or way.scheduler)


def client_in_rank(way: WorkerData) -> Client:
    from distributed import Client

    if (pid := os.getpid()) not in _clients:
        security = pickle.loads(way.security)  # noqa: S301 - from our own worker
        _clients[pid] = Client(way.scheduler, security=security, direct_to_workers=_reaches_workers(way), name="rank")
    return _clients[pid]


_clients: dict[int, Client] = {}
"""By process ID, as forks of the rank, such as DataLoader workers, cannot use the rank's client."""


def _reaches_workers(way: WorkerData) -> bool:
    return not way.worker.startswith("inproc:")


def _fetch(way: WorkerData, key: Key) -> Any:
    """Wait while Dask is computing a lost partition again.

    Dask's `Future` would wait for ever for lost scattered or unpicklable partitions. Here they raise LookupError and
    TypeError. OSError: the scheduler does not answer.
    """
    client = client_in_rank(way)
    while not (found := client.sync(_find, client, key, _reaches_workers(way))):
        _check_coming(key, client.sync(client.scheduler.get_task_status, keys=[key])[key])
        time.sleep(POLL_INTERVAL)
    return found.pop()


async def _find(client: Client, key: Key, reaches_workers: bool) -> list[Any]:
    from distributed.utils_comm import gather_from_workers

    if not reaches_workers:
        answer = await client.scheduler.gather(keys=[key])
        return list(answer.get("data", {}).values())
    holders = await client.scheduler.who_has(keys=[key])
    data, _, failed, _ = await gather_from_workers(holders, client.rpc)
    if failed:
        raise TypeError(
            f"partition {key!r} cannot be pickled by its worker, or cannot be unpickled in this rank. The logs of both "
            "have the error. Let the Dask task return plain data, such as NumPy arrays or pandas data frames."
        )
    return list(data.values())


def _check_coming(key: Key, state: str | None) -> None:
    if state is None:
        raise LookupError(
            f"Dask no longer knows partition {key!r}. Likely causes: the partition was scattered data, which were lost "
            "with their worker, or the driver closed its client or released the futures before the gang had ended. Let "
            "Dask compute the data instead of scattering them, and keep client and futures until then."
        )
    if state == "erred":
        raise LookupError(
            f"partition {key!r} was lost with its worker, and Dask failed to compute it again. The workers' logs have "
            "the cause. If workers were lost several times, raise Dask's distributed.scheduler.allowed-failures."
        )


# ---- Division of the partitions. All ranks compute the same division


def share_out(num_partitions: int, held: Sequence[Collection[int]]) -> list[list[int]]:
    """Divide partitions evenly among ranks. A rank gets those of its worker first.

    `held` has for each rank the numbers of its worker's partitions.
    """
    shares: list[list[int]] = [[] for _ in held]
    least = num_partitions // len(held)
    left = []
    for number in range(num_partitions):
        at_home = [rank for rank, own in enumerate(held) if number in own and len(shares[rank]) < least]
        if at_home:
            shares[min(at_home, key=lambda rank: len(shares[rank]))].append(number)
        else:
            left.append(number)
    for number in left:
        rank = min(range(len(held)), key=lambda rank: (len(shares[rank]), number not in held[rank]))
        shares[rank].append(number)
    return [sorted(share) for share in shares]
