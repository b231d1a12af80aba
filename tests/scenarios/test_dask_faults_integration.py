"""Gangs survive failures of Dask: cases 20 to 35 of the project's list of faults, by number."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import psutil
import pytest
from distributed import Client

import fault_training as ft
from flytekitplugins.daskpytorch import Gang, WorkerLostError, dispatch
from flytekitplugins.daskpytorch.driver import agents
from processes import (
    MAX_SECONDS,
    Cluster,
    dask_cluster,
    is_alive,
    nothing_left_behind,
    shared_cluster,
    start_worker,
    until,
)

SMALLER = Gang(min_workers=1)


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """On two hosts."""
    with shared_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture
def cluster(two_workers: Cluster) -> Cluster:
    """Both are there; the tests end them as they like."""
    two_workers.make_whole()
    return two_workers


def check_gone(*pids: int) -> None:
    """The gang may be faster than the kernel."""
    until(lambda: not any(is_alive(pid) for pid in pids), "the old ranks to end")


def gates(tmp_path: Path, *steps: int) -> None:
    for step in steps:
        (tmp_path / "traces" / f"gate-{step}").touch()


@pytest.mark.parametrize("signum", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_killed_worker_is_waited_for_at_its_new_address(
    cluster: Cluster, client: Client, launch: ft.Launch, signum: signal.Signals
) -> None:
    """20 and 24: the nanny brings a new worker, which has another port."""
    before = set(client.scheduler_info()["workers"])
    watched = launch(client, "wait")
    watched.wait_for("broken")
    cluster.worker_process(1).send_signal(signum)
    assert watched.futures.result() == [ft.expected()] * 2
    assert watched.starts(0) == watched.starts(1) == [0, ft.SAVED_AT]
    assert set(client.scheduler_info()["workers"]) != before
    assert any("127.0.0.3" in note and "its worker was lost" in note for note in watched.notes)
    check_gone(watched.broken_pid())


def test_a_killed_scheduler_is_named_soon(launch: ft.Launch, tmp_path: Path) -> None:  # 26
    with nothing_left_behind(), dask_cluster(tmp_path / "cluster") as cluster, Client(cluster.address) as client:
        gates(tmp_path, 6)
        watched = launch(client, gang=Gang(grace_period=2.0))
        watched.wait_for("kept-4")
        killed_at = time.time()
        cluster.scheduler.kill()
        with pytest.raises(WorkerLostError, match="scheduler was lost"):
            watched.futures.result()
        assert time.time() - killed_at < MAX_SECONDS
        check_gone(*watched.pids(0), *watched.pids(1))


def test_a_dropped_connection_of_the_client_does_not_matter(
    cluster: Cluster, client: Client, launch: ft.Launch, tmp_path: Path
) -> None:  # 28
    gates(tmp_path, 6)
    watched = launch(client)
    watched.wait_for("kept-4")
    client.scheduler_comm.comm.abort()
    until(lambda: client.status == "running" and client.scheduler_info()["workers"], "the client to connect again")
    time.sleep(1.0)
    watched.open(6)
    assert watched.futures.result() == [ft.expected()] * 2
    assert not watched.restarted_at


def test_dasks_memory_limits(tmp_path: Path, launch: ft.Launch) -> None:  # 29
    """A paused worker's ranks go on; a worker that Dask terminates is waited for."""
    freed = tmp_path / "freed"

    def hold_memory(share: float, path: str) -> None:  # in here, so that it travels by value
        from distributed import get_worker

        size = int(get_worker().memory_manager.memory_limit * share) - psutil.Process().memory_info().rss
        held = bytearray(size)
        held[::4096] = b"x" * len(held[::4096])
        while not Path(path).exists():
            time.sleep(0.05)

    with (
        nothing_left_behind(),
        dask_cluster(tmp_path / "cluster", memory_limit="600MiB", is_warm=False) as cluster,
        Client(cluster.address) as client,
    ):
        gates(tmp_path, 3, 6)
        watched = launch(client)
        watched.wait_for("start-1")
        victim = sorted(client.scheduler_info()["workers"])[1]
        client.submit(hold_memory, 0.88, str(freed), workers=[victim], pure=False, priority=1)

        def status() -> str:
            return str(client.sync(client.scheduler.identity)["workers"].get(victim, {}).get("status"))

        until(lambda: status() == "paused", "the worker to pause")
        watched.open(3)
        watched.wait_for("kept-4")  # the gang trained on a paused worker
        freed.touch()
        until(lambda: status() == "running", "the worker to go on")
        client.submit(hold_memory, 1.2, str(tmp_path / "never"), workers=[victim], pure=False)
        until(lambda: status() == "None", "the nanny to terminate the worker")
        until(lambda: watched.restarted_at, "the restart")  # the ranks' last steps may be quicker
        watched.open(6)
        assert watched.futures.result() == [ft.expected()] * 2
        assert watched.starts(0) == [0, ft.SAVED_AT]


def test_a_gang_grows_back_at_a_checkpoint_when_a_worker_comes(
    cluster: Cluster, client: Client, launch: ft.Launch, tmp_path: Path
) -> None:  # 31
    gates(tmp_path, 7, 9)
    watched = launch(client, "wait", gang=SMALLER)
    watched.wait_for("broken")
    cluster.kill_worker(1)
    until(lambda: len(watched.formed_at) == 2, "the gang to go on with one rank")
    end_worker = start_worker(cluster.address, 0, tmp_path)
    try:
        until(lambda: len(watched.futures._supervisor._gang.state.agents.nodes()) == 2, "the new worker's agent")
        watched.open(7)
        until(lambda: len(watched.starts(0)) == 3, "the gang to grow")
        watched.open(9)
        assert watched.futures.result() == [ft.expected({1: 2, 5: 1, 9: 2})] * 2
        assert watched.starts(0) == [0, 4, 8]
    finally:
        end_worker()


def test_three_gangs_on_the_same_workers(client: Client, tmp_path: Path) -> None:
    """32 and 33: one trains, one loses a rank and starts again, one is cancelled; none disturbs another."""
    with (
        ft.watching(tmp_path / "a") as launch_a,
        ft.watching(tmp_path / "b") as launch_b,
        ft.watching(tmp_path / "c") as launch_c,
    ):
        doomed = launch_c(client, "wait")
        calm, broken = launch_a(client, pace=0.2), launch_b(client, "SIGKILL", pace=0.05)
        doomed.wait_for("broken")
        assert doomed.futures.cancel()
        with pytest.raises(CancelledError):
            doomed.futures.result()
        assert calm.futures.result() == broken.futures.result() == [ft.expected()] * 2
        assert calm.starts(0) == [0]
        assert broken.starts(0) == [0, ft.SAVED_AT]
        check_gone(doomed.broken_pid())


def port_of_the_store() -> int:
    return int(os.environ["MASTER_PORT"])


def test_the_stores_port_is_bound_when_it_is_picked(client: Client) -> None:
    """34: the driver binds port 0 and keeps it, so that nobody can take the port in between, however many gangs."""
    gangs = [dispatch.run(client, port_of_the_store) for _ in range(4)]
    ports = [gang.result() for gang in gangs]
    assert all(one == other for one, other in ports)
    listening = {c.laddr.port for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}
    assert not listening & {one for one, _ in ports}  # given back with the gangs


@pytest.fixture
def network(tmp_path: Path) -> Iterator[tuple[str, str, str]]:
    """A second host, as a network namespace: its name, the address on this side, and the one on the other."""
    name = f"dp{os.getpid()}"
    here, there = (f"10.213.{os.getpid() % 256}.{number}" for number in (1, 2))  # other runs of this have theirs
    commands = [
        f"ip netns add {name}",
        f"ip link add {name}a type veth peer name {name}b netns {name}",
        f"ip addr add {here}/24 dev {name}a",
        f"ip link set {name}a up",
        f"ip -n {name} addr add {there}/24 dev {name}b",
        f"ip -n {name} link set {name}b up",
        f"ip -n {name} link set lo up",
    ]
    try:
        for command in commands:
            try:
                subprocess.run(command.split(), check=True, capture_output=True)
            except (OSError, subprocess.CalledProcessError) as error:
                pytest.skip(f"no network namespaces here: {error}")
        yield name, here, there
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.mark.slow
def test_a_network_partition(
    network: tuple[str, str, str], tmp_path: Path, launch: ft.Launch, monkeypatch: pytest.MonkeyPatch
) -> None:  # 35
    monkeypatch.setattr(agents, "MAX_SILENCE", 6.0)
    name, here, there = network
    with (
        nothing_left_behind(),
        dask_cluster(
            tmp_path / "cluster",
            scheduler_host=here,
            hosts=[here, there],
            prefixes={1: ["ip", "netns", "exec", name]},
        ) as cluster,
        Client(cluster.address) as client,
    ):
        watched = launch(client, "wait", gang=SMALLER)
        watched.wait_for("broken")
        subprocess.run(["ip", "link", "set", f"{name}a", "down"], check=True)
        cut_at = time.time()
        assert watched.futures[0].result() == ft.expected({1: 2, ft.SAVED_AT + 1: 1})
        assert watched.formed_at[-1] - cut_at < agents.MAX_SILENCE + MAX_SECONDS
        until(lambda: not is_alive(watched.broken_pid()), "the rank beyond the partition to end")


def test_a_suspended_worker_is_given_up_and_may_not_write(
    cluster: Cluster, client: Client, launch: ft.Launch, monkeypatch: pytest.MonkeyPatch
) -> None:  # 16, 35
    monkeypatch.setattr(agents, "MAX_SILENCE", 6.0)
    watched = launch(client, "wait", at_rank=0, gang=SMALLER)
    watched.wait_for("broken")
    suspended = cluster.worker_process(0)
    suspended.suspend()
    try:
        assert watched.futures[0].result() == ft.expected({1: 2, ft.SAVED_AT + 1: 1})
    finally:
        suspended.resume()
    until(lambda: not is_alive(watched.broken_pid()), "the old rank to end")
    assert watched.kept in ([4], [4, 8])  # a gang that has its results waits for no checkpoint
