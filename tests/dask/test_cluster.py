"""The driver connects to a cluster, makes a local one, or reports that no scheduler answers."""

import asyncio
import contextlib
import queue
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from urllib.error import HTTPError

import dask
import pytest
from distributed import Client, LocalCluster, Worker

from flytekitplugins.daskpytorch import dispatch
from flytekitplugins.daskpytorch.dask import agents as agents_on_dask
from flytekitplugins.daskpytorch.dask import cluster
from flytekitplugins.daskpytorch.dask.agents import DaskAgents
from flytekitplugins.daskpytorch.errors import GangStartError, WorkerLostError
from flytekitplugins.daskpytorch.protocol.host import AgentOrder
from processes import until


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of something that accepts connections and then says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"


def test_a_scheduler_that_says_nothing_does_not_hold_up_the_driver(
    silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", silent)
    with (
        pytest.raises(
            GangStartError, match=rf"answered at {silent} .* did not answer as a scheduler within"
        ) as failure,
        cluster.opened(num_workers=1, start_timeout=1.5),
    ):
        raise AssertionError("there is no scheduler")
    assert f"at {silent} (DASK_SCHEDULER_ADDRESS: unset it to train on this machine) in time" in str(failure.value)
    assert "See the scheduler pod's log" in str(failure.value)


def test_a_scheduler_is_greeted_also_inside_an_event_loop(silent: str) -> None:
    async def greet() -> None:
        cluster.greet(silent, 0.3)

    with pytest.raises(TimeoutError, match=r"did not answer as a scheduler within 0\.3 s"):
        asyncio.run(greet())


def intervals() -> dict[str, float]:
    """What a worker of a cluster made here does over and over, and after how many milliseconds."""

    def of(dask_worker: Worker) -> dict[str, float]:
        return {name: callback.callback_time for name, callback in dask_worker.periodic_callbacks.items()}

    with cluster.opened(num_workers=1, start_timeout=300) as client:
        [found] = client.run(of).values()
    return found


def test_a_cluster_made_here_leaves_the_cores_to_the_ranks() -> None:
    found = intervals()
    assert found["tick"] == 1000
    assert "profile" not in found
    assert dask.config.get("distributed.admin.tick.interval") == "20ms"  # for what else this process does with Dask


def test_the_users_dask_settings_win() -> None:
    with dask.config.set({"distributed.admin.tick.interval": "50ms"}):
        assert intervals()["tick"] == 50


def test_a_cluster_made_here_listens_on_the_loopback_without_a_dashboard() -> None:
    with cluster.opened(num_workers=2, start_timeout=300) as client:
        port = client.cluster.scheduler.http_server.port
        with pytest.raises(HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=60)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    """Two workers that are threads of this process."""
    monkeypatch.setattr(agents_on_dask, "LOOK_TIMEOUT", 60.0)  # scheduler, workers and client share an event loop
    with LocalCluster(n_workers=2, processes=False, dashboard_address="127.0.0.1:0", memory_limit=0) as made:
        yield made


def test_a_worker_is_named_by_its_dask_name_before_its_address_also_after_its_loss() -> None:
    """On Flyte the Dask name is the start of the pod's name."""
    with (
        LocalCluster(n_workers=1, processes=False, dashboard_address="127.0.0.1:0", protocol="tcp://") as made,
        Client(made) as client,
    ):

        async def start() -> Worker:
            return await Worker(made.scheduler_address, name="f3a-n0-0-default-worker-8c1f")

        pod = client.sync(start)
        agents = DaskAgents(client)
        [numbered] = agents.addresses.keys() - {pod.address}
        client.sync(pod.close)
        until(lambda: pod.address not in agents.present(), "the loss of the pod")
        assert agents.title(pod.address) == f"f3a-n0-0-default-worker-8c1f ({pod.address})"
        assert agents.title(numbered) == numbered


def test_workers_that_are_kept_for_evaluations_go_to_no_other_gang_and_are_replaced(made: LocalCluster) -> None:
    with Client(made) as client:
        with contextlib.closing(DaskAgents(client, num_kept=1)) as agents:
            [own] = agents.workers
            assert agents.present() == [own]
            beside = agents.beside()
            assert beside is not None
            [kept] = beside.workers
            assert kept != own
            assert (agents.num_wanted, beside.num_wanted, beside.present()) == (1, 1, [kept])
            made.sync(made.workers.pop(1).close)
            assert beside.present() == []
            beside.close()
            assert agents.beside() is None
            made.scale(2)
            until(agents.beside, "a worker in the place of the lost one")
            assert agents.present() == [own]
            made.scale(0)
            until(lambda: not agents.present(), "the loss of both workers")
            made.scale(1)
            until(agents.present, "a spare worker")
            assert agents.beside() is None
            assert agents.present(), "the evaluation has taken the worker that the training lacks"
        made.scale(2)
        client.wait_for_workers(2, timeout=60)
        with contextlib.closing(DaskAgents(client, num_kept=0)) as agents:
            beside = agents.beside()
            assert beside is not None
            assert beside.workers == beside.present() == agents.workers[:1]
            assert len(agents.workers) == 2
        assert DaskAgents(client).beside() is None


def test_a_spare_worker_that_two_gangs_want_at_once_goes_to_the_first(
    made: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents_on_dask, "serve", lambda *_: None)  # an agent would call its driver for a minute
    lost: list[str] = []
    with Client(made) as client, contextlib.ExitStack() as ends:
        first, second = (ends.enter_context(contextlib.closing(DaskAgents(client, 1))) for _ in range(2))
        made.scale(3)
        until(lambda: len(first.present()) == len(second.present()) == 2, "the spare worker")
        [spare] = set(first.present()) & set(second.present())
        order = AgentOrder(worker=spare, driver=("127.0.0.1", 1), token=b"")
        first.launch([order], lambda *_: None)
        second.launch([order], lambda worker, error: lost.append(f"{worker}: {error}"))
        assert lost == [f"{spare}: another gang has taken the worker"]
        assert (spare in first.present(), spare in second.present()) == (True, False)


STARTED, ENDED = threading.Event(), threading.Event()


def wait_for_the_end(*_: object) -> None:
    STARTED.set()
    ENDED.wait(60)


def lose_worker(made: LocalCluster, client: Client, address: str) -> None:
    made.sync(made.scheduler.remove_worker, address, stimulus_id="test")


def lose_scheduler(made: LocalCluster, client: Client, address: str) -> None:
    client.loop.add_callback(client.scheduler_comm.comm.abort)  # the client cancels all tasks then


@pytest.mark.parametrize("lose", [lose_worker, lose_scheduler])
def test_a_worker_may_come_back_whose_agent_was_lost_with_the_worker_or_the_scheduler(
    made: LocalCluster, monkeypatch: pytest.MonkeyPatch, lose: Callable[[LocalCluster, Client, str], None]
) -> None:
    monkeypatch.setattr(agents_on_dask, "serve", wait_for_the_end)
    STARTED.clear()
    ENDED.clear()
    made.scheduler.allowed_failures = 0  # as Flyte's backend has it
    told: queue.SimpleQueue[tuple[str, Exception]] = queue.SimpleQueue()
    with Client(made) as client:
        agents = DaskAgents(client)
        worker = agents.workers[0]
        order = AgentOrder(worker=worker, driver=("127.0.0.1", 1), token=b"")
        agents.launch([order], lambda *how: told.put(how))
        assert STARTED.wait(60)
        lose(made, client, agents.addresses[worker])
        ENDED.set()
        name, error = told.get(timeout=60)
    assert name == worker
    assert isinstance(error, WorkerLostError)


def test_a_gang_on_an_adaptive_cluster_without_workers_is_told_what_brings_some(made: LocalCluster) -> None:
    with Client(made) as client:
        made.scale(0)
        until(lambda: not client.scheduler_info()["workers"], "the workers to go")
        with pytest.raises(GangStartError, match=r"has 0 workers, but needs 1\. .*client\.cluster\.adapt\(minimum=n\)"):
            dispatch.run(client, len, [])
