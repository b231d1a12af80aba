"""Ranks on real clusters read partitions that Dask holds."""

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask.array
import pytest
from dask.bag import from_sequence
from distributed import Client, LocalCluster, Security

from flytekitplugins.daskpytorch import Gang, current_rank, data, dispatch
from flytekitplugins.daskpytorch.protocol.placement import worker_order
from processes import Cluster, dask_cluster, until

ONCE = Gang(max_restarts=0)
HOSTS = ["127.0.0.2", "127.0.0.3", "127.0.0.4"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three workers on three hosts."""
    with dask_cluster(tmp_path_factory.mktemp("cluster"), num_workers=3, hosts=HOSTS) as running:
        yield running


# ---- What the ranks run.


def read(partitions: data.DaskPartitions) -> dict[int, Any]:
    """This rank's partitions, by their numbers."""
    share = partitions.share()
    return dict(zip(share.indices, share, strict=True))


def read_beside_rank_0(partitions: data.DaskPartitions) -> dict[int, Any]:
    """The same, but rank 0 reads nothing."""
    share = partitions.share()
    return dict(enumerate(share)) if current_rank().rank > 0 else {}


def read_in_loader_process(partitions: data.DaskPartitions) -> list[Any]:
    """The same, read by a process that the rank has forked."""
    from torch.utils.data import DataLoader

    share = partitions.share()
    return list(DataLoader(share, batch_size=None, num_workers=1))  # type: ignore[arg-type]


def read_after_a_loss(computed: data.DaskPartitions, scattered: data.DaskPartitions, started: str) -> Any:
    """Three ranks only start to read; the two that are left read all of it."""
    share = computed.share()
    if current_rank().world_size == 3:
        Path(started + str(current_rank().rank)).write_text(str(share[0]))
        time.sleep(600)
    lost = ""
    try:
        read(scattered)
    except LookupError as error:
        lost = str(error)
    return dict(zip(share.indices, share, strict=True)), lost


# ---- What Dask runs: not in this module, which its workers do not have.


def made_by_dask(client: Client, count: int, workers: list[str]) -> list[Any]:
    """Partition i is a list of its number, made on one of these workers, each in turn."""

    class Partition(list):  # type: ignore[type-arg]
        """Cannot be unpickled in the driver."""

        def __reduce__(self) -> Any:
            return open_elsewhere, (list(self),)

    driver = os.getpid()

    def open_elsewhere(content: list[int]) -> list[int]:
        assert os.getpid() != driver, "a partition came to the driver"
        return Partition(content)

    return [
        client.submit(lambda number=number: Partition([number] * 1_000), workers=[workers[number % len(workers)]])
        for number in range(count)
    ]


def addresses(client: Client) -> list[str]:
    """The workers, in the order of the ranks."""
    return sorted(client.scheduler_info(n_workers=-1)["workers"], key=worker_order)


def sent(client: Client) -> Counter[str]:
    """How many partitions each worker has handed out, since the cluster is there."""
    logs = client.run(lambda dask_worker: sum(len(entry["keys"]) for entry in dask_worker.transfer_outgoing_log))
    return Counter(logs)


def test_each_rank_reads_what_its_own_worker_holds(client: Client) -> None:
    before = sent(client)
    partitions = made_by_dask(client, 12, addresses(client))
    futures = dispatch.run(client, read_numbers, data.DaskPartitions(client, partitions), gang=ONCE)
    assert futures.result() == [{number: number for number in range(rank, 12, 3)} for rank in range(3)]
    assert sent(client) - before == dict.fromkeys(addresses(client), 4)


def read_numbers(partitions: data.DaskPartitions) -> dict[int, int]:
    """For results that the driver may see."""
    return {number: partition[999] for number, partition in read(partitions).items()}


def test_a_loader_process_reads_a_bag_that_nobody_else_keeps(client: Client) -> None:
    names = [f"Name {number} " for number in range(60)]
    bag = from_sequence(names, npartitions=6).map(str.strip).map(str.lower)
    read = dispatch.run(client, read_in_loader_process, data.DaskPartitions(client, bag), gang=ONCE).result()
    assert sorted(name for share in read for partition in share for name in partition) == sorted(
        f"name {number}" for number in range(60)
    )


def test_what_cannot_be_shared_is_refused(client: Client) -> None:
    two = data.DaskPartitions(client, from_sequence("ab", npartitions=2))
    with pytest.raises(ValueError, match=r"2 partitions cannot be shared by 3 ranks.*repartition\(npartitions=6\)"):
        dispatch.run(client, read, two, gang=ONCE).result()
    with pytest.raises(RuntimeError, match="works in the ranks of dispatch"):
        two.share()
    with pytest.raises(ValueError, match="no partitions"):
        data.DaskPartitions(client, [])
    with pytest.raises(ValueError, match="a dict is no Dask collection"):
        data.DaskPartitions(client, {"names": []})
    with pytest.raises(ZeroDivisionError) as failed:
        data.DaskPartitions(client, from_sequence([1, 1, 0], npartitions=3).map(lambda number: 1 / number))
    assert failed.value.__notes__ == ["in partition 2 of 3, which Dask was to make for the training"]


@pytest.mark.parametrize("num_holders", [1, 3])
def test_what_cannot_travel_fails_with_its_reason(client: Client, num_holders: int) -> None:
    holders = addresses(client)[:num_holders]
    locks = [client.submit(threading.Lock, workers=[holders[i % num_holders]], pure=False) for i in range(3)]
    with pytest.raises(TypeError, match=r"cannot be (un)?pickled"):
        dispatch.run(client, read_beside_rank_0, data.DaskPartitions(client, locks), gang=ONCE).result()


def test_each_kind_of_collection_has_its_partitions_and_that_of_another_cluster_is_refused(client: Client) -> None:
    with LocalCluster(n_workers=1, processes=False, dashboard_address=None) as other, Client(other) as stranger:
        array = dask.array.arange(8, chunks=2).reshape(2, 4)
        assert len(data.DaskPartitions(stranger, array)) == array.npartitions > 1
        assert len(data.DaskPartitions(stranger, dask.delayed(pow)(2, 3))) == 1
        assert len(data.DaskPartitions(stranger, [dask.delayed(pow)(2, 3), stranger.submit(pow, 2, 3)])) == 2
        bag = stranger.persist(from_sequence(range(4), npartitions=4))
        for collection in (bag, bag.map(str), stranger.map(str, range(4))):
            with pytest.raises(ValueError, match=f"lies on the cluster at {other.scheduler_address}"):
                data.DaskPartitions(client, collection)


def test_what_travels_to_ranks_travels_by_the_clusters_own_tls() -> None:
    how: Any = {"protocol": "tls://", "security": Security.temporary(), "dashboard_address": None}
    with LocalCluster(n_workers=2, threads_per_worker=1, processes=False, **how) as made, Client(made) as client:
        futures = client.scatter(list(range(6)), workers=addresses(client)[:1])
        results = dispatch.run(client, read, data.DaskPartitions(client, futures), gang=ONCE).result()
        assert sorted(map(len, results)) == [3, 3]
        assert results[0] | results[1] == {number: number for number in range(6)}
        assert +sent(client) == {addresses(client)[0]: 6}


def test_what_is_lost_with_its_worker_is_computed_anew_and_shared_by_those_left(
    cluster: Cluster, client: Client, tmp_path: Path
) -> None:
    """The last one on that cluster: it takes a worker away."""
    started, workers = str(tmp_path / "started-"), addresses(client)
    computed = [
        client.submit(pow, number, 2, workers=[workers[number % 3]], allow_other_workers=True) for number in range(9)
    ]
    scattered = client.scatter(["a", "b", "c"], workers=workers[-1:])
    futures = dispatch.run(
        client,
        read_after_a_loss,
        data.DaskPartitions(client, computed),
        data.DaskPartitions(client, scattered),
        started,
        gang=Gang(min_workers=2, max_restarts=1),
    )
    until(lambda: all(Path(started + str(rank)).exists() for rank in range(3)), "all ranks to read")
    cluster.kill_worker(2)
    (first, lost), (second, _) = futures[0].result(), futures[1].result()
    assert sorted([*first, *second]) == list(range(9))
    assert first | second == {number: number**2 for number in range(9)}
    assert 4 <= len(first) <= 5
    assert "scattered" in lost
