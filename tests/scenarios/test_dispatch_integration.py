"""Gangs train on real Dask clusters. Schedulers, workers and ranks are separate processes."""

import ctypes
import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from distributed import Client, LocalCluster

from flytekitplugins.daskpytorch import (
    Gang,
    GangError,
    GangStartError,
    WorkerLostError,
    current_rank,
    dispatch,
    results,
)
from flytekitplugins.daskpytorch.dask import agents as dask_agents
from flytekitplugins.daskpytorch.dask import on_worker
from processes import Cluster, dask_cluster, nothing_left_behind, until

ONCE = Gang(max_restarts=0)
"""For tests of how a gang ends."""


# ---- What the ranks run. They find these by name: the sources travel with the gang.


def weighted_sum(factor: int, x: int = 0) -> tuple[int, float]:
    """Only a formed gang has this sum."""
    import torch.distributed as dist

    rank = current_rank()
    total = torch.tensor(float(10**rank.rank))
    dist.all_reduce(total)
    return rank.rank, factor * total.item() + x


def lose_a_worker(folder: str) -> int:
    """Rank 1 stays until its worker is taken away; the others then have to start again."""
    rank = current_rank()
    Path(folder, f"started-{rank.world_size}-{rank.rank}").touch()
    while rank.world_size == 2:
        time.sleep(0.05)
    results.DaskResultsHandler().submit_result("ended.txt", "ended")
    return 10 + rank.rank


def crash_on_rank_1() -> None:
    """Rank 0 waits for it in a collective, for as long as it takes."""
    import torch.distributed as dist

    if current_rank().rank == 1:
        ctypes.string_at(0)
    dist.barrier()


# ---- The tests


def test_ranks_can_be_told_apart_by_what_the_system_shows_of_them(client: Client) -> None:
    names = dispatch.run(client, Path("/proc/self/comm").read_text).result()
    assert names == ["rank 0/2\n", "rank 1/2\n"]


def test_the_error_of_a_crash_says_which_rank_it_was_and_in_which_line(client: Client) -> None:
    with pytest.raises(GangError, match="SIGSEGV") as caught:
        dispatch.run(client, crash_on_rank_1, gang=ONCE).result()
    assert (caught.value.rank, "127.0.0.3" in str(caught.value.worker)) == (1, True)
    assert not isinstance(caught.value, WorkerLostError)
    assert "in crash_on_rank_1" in caught.value.log_tail  # faulthandler says where


def test_a_client_that_has_closed_itself_is_a_lost_scheduler(cluster: Cluster) -> None:
    with Client(cluster.address) as client:
        agents = dask_agents.DaskAgents(client)
        assert len(agents.present()) == 2
    with pytest.raises(ConnectionError, match="the Dask client has closed itself"):
        agents.present()


def test_a_gang_that_shrank_has_the_results_of_its_ranks(
    breakable: Cluster, client: Client, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    futures = dispatch.run(client, lose_a_worker, str(tmp_path), gang=Gang(min_workers=1))
    until(lambda: all((tmp_path / f"started-2-{rank}").exists() for rank in "01"), "the ranks to start")
    breakable.kill_worker(1)
    assert futures.result() == [10]
    assert futures.exception() is None
    assert [future.exception() is None for future in futures] == [True, False]
    with pytest.raises(GangStartError, match="there was no rank 1"):
        futures[1].result()
    results.DaskResultsHandler().process_results(tmp_path / "results", futures)
    assert (tmp_path / "results" / "ended.txt").read_text() == "ended"
    assert "lose_a_worker: ended with 1 of 2 workers, as min_workers allows" in capfd.readouterr().err


def test_a_scheduler_that_says_nothing_is_named(
    cluster: Cluster, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dask_agents, "FIRST_LOOK_TIMEOUT", 0.5)
    cluster.scheduler.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(GangStartError, match=rf"{cluster.address} is connected, but did not say within 0.5 s"):
            dispatch.run(client, weighted_sum, 1)
    finally:
        cluster.scheduler.send_signal(signal.SIGCONT)


def test_a_gang_does_not_wait_for_a_worker_that_is_being_scaled_away() -> None:
    with LocalCluster(n_workers=2, processes=False, dashboard_address=None) as local, Client(local) as client:
        local.scale(1)
        assert dask_agents.DaskAgents(client).num_wanted == 1
        assert dispatch.run(client, weighted_sum, 5).result() == [(0, 5.0)]


def test_an_agent_does_not_wait_for_its_workers_event_loop() -> None:
    free = threading.Event()
    with LocalCluster(n_workers=1, processes=False, dashboard_address=None) as local:
        worker = local.workers[0]
        worker.loop.add_callback(free.wait, 60)
        with on_worker._close_signal(worker):
            pass
        assert not free.is_set()
        free.set()
    assert not worker.plugins  # and the worker could close


def test_a_worker_that_is_closing_counts_no_more(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    found = client.scheduler_info()
    leaving, *staying = found["workers"]
    found["workers"][leaving]["status"] = "closing_gracefully"
    monkeypatch.setattr(dask_agents.cluster, "identity", lambda *_: found)
    assert list(dask_agents.DaskAgents(client).workers) == staying


def imports_torch(server: psutil.Process) -> bool:
    return any("libtorch" in file.path for file in server.memory_maps())


@pytest.mark.slow  # starts cold
def test_workers_may_start_their_fork_servers_ahead(tmp_path: Path) -> None:
    preload = {"DASK_DISTRIBUTED__WORKER__PRELOAD": "flytekitplugins.daskpytorch.preload"}
    with (
        nothing_left_behind(),
        dask_cluster(tmp_path, worker_environments={0: preload, 1: preload}, is_warm=False) as cluster,
        Client(cluster.address) as client,
    ):
        servers = [child for index in range(2) for child in cluster.worker_process(index).children()]
        assert len(servers) == 2
        until(lambda: all(map(imports_torch, servers)), "the fork servers to be ready before any gang")
        assert set(dispatch.run(client, os.getppid).result()) == {server.pid for server in servers}
