"""A rank uses Dask by a client of its own, or not at all."""

import logging
import sys
from collections.abc import Iterator

import pytest
from distributed import Client, LocalCluster

from flytekitplugins.daskpytorch import dispatch
from flytekitplugins.daskpytorch.node import fork_client

pytestmark = pytest.mark.usefixtures("cold_fork_servers")


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    fork_client.shutdown()
    with (
        pytest.MonkeyPatch.context() as patch,
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as connected,
    ):
        patch.setattr(fork_client, "_imported_ahead", [])  # nothing of Dask
        yield connected
    fork_client.shutdown()


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
