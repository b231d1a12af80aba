"""Dask's functions work in a rank: client, worker and shared objects, with workers as threads or processes."""

import logging
import socket
import sys
from collections.abc import Iterator
from typing import Any

import dask.array as da
import pytest
from distributed import Client, Event, Future, LocalCluster, Lock, Variable, get_client, get_worker

from flytekitplugins.daskpytorch import current_rank, dispatch
from flytekitplugins.daskpytorch.dask import in_rank
from flytekitplugins.daskpytorch.node import fork_client

pytestmark = pytest.mark.usefixtures("cold_fork_servers")


@pytest.fixture(scope="module", params=[pytest.param("threads", marks=pytest.mark.slow), "processes"])
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    fork_client.shutdown()
    with (
        pytest.MonkeyPatch.context() as patch,
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=request.param == "processes", dashboard_address=None
        ) as cluster,
        Client(cluster) as connected,
    ):
        patch.setattr(fork_client, "_imported_ahead", [])  # nothing of Dask
        yield connected
    fork_client.shutdown()


def look_around() -> tuple[Any, str, bool]:
    worker = get_worker()
    return worker.name, worker.address, get_client() is get_client()


def test_a_rank_knows_its_worker_and_has_one_client(client: Client) -> None:
    found = dispatch.run(client, look_around).result()
    names = client.run(lambda dask_worker: dask_worker.name)
    assert {(name, address) for name, address, _ in found} == {(name, address) for address, name in names.items()}
    assert all(is_same for *_, is_same in found)


def use(array: da.Array, future: Future[int]) -> tuple[int, int, int]:
    rows = array[current_rank().rank :: current_rank().world_size]
    return int(rows.sum().compute()), future.result(), get_client().submit(pow, 2, 5).result()


def test_persisted_collections_and_futures_are_arguments(client: Client) -> None:
    array, future = da.arange(10, chunks=3).persist(), client.submit(lambda: 42)
    assert dispatch.run(client, use, array, future).result() == [(20, 42, 32), (25, 42, 32)]


def count(lock: str, number: str, done: str) -> bool:
    """Add one, each rank after the other; rank 0 waits until all have."""
    with Lock(lock):
        variable = Variable(number)
        variable.set(variable.get() + 1)
        if variable.get() == current_rank().world_size:
            Event(done).set()
    return bool(Event(done).wait("60s"))


def test_locks_variables_and_events_are_the_clusters(client: Client) -> None:
    with client.as_current():
        (number := Variable("number")).set(0)
        assert dispatch.run(client, count, "lock", "number", "done").result() == [True, True]
        assert number.get() == 2


def speak() -> None:
    logging.getLogger("distributed.worker").info("an INFO record of Dask's")


def test_records_of_dasks_worker_come_out(client: Client, capfd: pytest.CaptureFixture[str]) -> None:
    dispatch.run(client, speak).result()
    said = capfd.readouterr().err
    assert all(f"[rank {rank}]" in said for rank in (0, 1))
    assert said.count("an INFO record of Dask's") == 2


def test_a_gang_that_does_not_ask_for_dask_has_none_of_it(client: Client) -> None:
    def modules_of_dask() -> list[str]:  # by value, since this module imports Dask
        return [name for name in sys.modules if name.partition(".")[0] in ("dask", "distributed")]

    before = set(client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.clients)))
    assert dispatch.run(client, modules_of_dask).result() == [[], []]
    assert set(client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.clients))) == before


def test_only_a_process_with_the_token_learns_of_the_cluster() -> None:
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None) as cluster,
        in_rank.served(cluster.workers[0]) as way,
    ):
        for sent in (b"", b"x" * len(way.token)):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(way.address)
                stranger.sendall(sent)
                stranger.shutdown(socket.SHUT_WR)
                assert stranger.recv(1) == b""
        assert in_rank.worker_of(way).address == cluster.workers[0].address
