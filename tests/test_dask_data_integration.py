"""Ranks that are fed from what Dask holds, on real clusters."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from flytekitplugins.daskpytorch import Gang, current_rank, data, dispatch
from flytekitplugins.daskpytorch.placement import worker_order
from processes import Cluster, dask_cluster

pytestmark = pytest.mark.timeout(120)

ONCE = Gang(max_restarts=0)
HOSTS = ["127.0.0.2", "127.0.0.3", "127.0.0.4"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three workers on three hosts, for all tests that leave them alive."""
    with dask_cluster(tmp_path_factory.mktemp("cluster"), num_workers=3, hosts=HOSTS) as running:
        yield running


# ---- What the ranks run.


def read(partitions: data.DaskPartitions) -> dict[int, Any]:
    """This rank's partitions, by their numbers."""
    share = partitions.share()
    return dict(zip(share.indices, share, strict=True))


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


def sent(client: Client) -> list[tuple[str, str]]:
    """Who has got something from which worker, since the cluster is there."""
    logs = client.run(
        lambda dask_worker: [(entry["who"], entry["keys"]) for entry in dask_worker.transfer_outgoing_log]
    )
    return [(who, sender) for sender, log in logs.items() for who, keys in log for _ in keys]


def test_each_rank_reads_what_its_own_worker_holds(client: Client) -> None:
    before = len(sent(client))
    partitions = made_by_dask(client, 12, addresses(client))
    futures = dispatch.run(client, read_numbers, data.DaskPartitions(client, partitions), gang=ONCE)
    assert futures.result() == [{number: number for number in range(rank, 12, 3)} for rank in range(3)]
    assert len(sent(client)) == before


def read_numbers(partitions: data.DaskPartitions) -> dict[int, int]:
    """For results that the driver may see."""
    return {number: partition[999] for number, partition in read(partitions).items()}


def test_what_lies_on_one_worker_goes_straight_to_the_others(client: Client) -> None:
    first, *others = addresses(client)
    before = len(sent(client))
    partitions = made_by_dask(client, 12, [first])
    results = dispatch.run(client, read_numbers, data.DaskPartitions(client, partitions), gang=ONCE).result()
    assert [len(result) for result in results] == [4, 4, 4]
    assert {number: content for result in results for number, content in result.items()} == {i: i for i in range(12)}
    assert sorted(sent(client)[before:]) == sorted((other, first) for other in others for _ in range(4))
