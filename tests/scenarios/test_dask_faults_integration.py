"""Gangs survive failures of Dask.

`benchmarks/chaos.py` draws the loss of workers, nannies, pods and the scheduler, and the growth with new workers.
"""

import os
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import psutil
import pytest
from distributed import Client

import fault_training as ft
from flytekitplugins.daskpytorch import Gang, dispatch
from flytekitplugins.daskpytorch.driver import agents
from processes import MAX_SECONDS, Cluster, dask_cluster, is_alive, nothing_left_behind, until

SMALLER = Gang(min_workers=1)


def test_a_dropped_connection_of_the_client_does_not_matter(
    cluster: Cluster, client: Client, launch: ft.Launch, tmp_path: Path
) -> None:
    (tmp_path / "traces/gate-6").touch()
    watched = launch(client)
    watched.wait_for("kept-4")
    client.scheduler_comm.comm.abort()
    until(lambda: client.status == "running" and client.scheduler_info()["workers"], "the client to connect again")
    time.sleep(1.0)
    watched.open(6)
    assert watched.futures.result() == [ft.expected()] * 2
    assert watched.starts(0) == [0]


def test_three_gangs_on_the_same_workers(client: Client, tmp_path: Path) -> None:
    """One trains, one loses a rank and starts again, one is cancelled; none disturbs another."""
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
        until(lambda: not is_alive(doomed.broken_pid()), "the old rank to end")


def port_of_the_store() -> int:
    return int(os.environ["MASTER_PORT"])


def test_the_stores_port_is_bound_when_it_is_picked(client: Client) -> None:
    """The driver binds port 0 and keeps it, so that nobody can take the port in between, however many gangs."""
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
            tmp_path / "cluster", scheduler_host=here, hosts=[here, there], prefixes={1: ["ip", "netns", "exec", name]}
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
) -> None:
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
