"""Gangs on real Dask clusters: schedulers, workers and ranks are processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError
from importlib import import_module
from pathlib import Path
from typing import Any

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
from flytekitplugins.daskpytorch.driver import brain
from flytekitplugins.daskpytorch.node import fork_client
from processes import (
    PRELOAD,
    Cluster,
    dask_cluster,
    marked,
    nothing_left_behind,
    num_open_files,
    run_after_a_pause,
    until,
)
from warm import start_cold

ONCE = Gang(max_restarts=0)
"""For tests of how a gang ends; see test_faults_integration.py for how it starts again."""


# ---- What the ranks run. They find these by name: the sources travel with the gang.


def weighted_sum(factor: int, x: int = 0) -> tuple[int, float]:
    """Only a formed gang has this sum."""
    import torch
    import torch.distributed as dist

    rank = current_rank()
    total = torch.tensor(float(10**rank.rank))
    dist.all_reduce(total)
    return rank.rank, factor * total.item() + x


def count_call(path: str) -> int:
    """Leave a trace of every call."""
    with Path(path).open("a") as file:
        file.write(f"{current_rank().rank}\n")
    return os.getpid()


def environment_of_rank(local_rank: int) -> dict[str, str]:
    """What plain PyTorch code reads."""
    import torch

    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {name: os.environ[name] for name in names} | {
        "argument": str(local_rank),
        "threads": str(torch.get_num_threads()),
        "worker": str(current_rank().device),
    }


def meet(own: str, other: str) -> float:
    """Finish only while another gang runs: both must have started."""
    import torch
    import torch.distributed as dist

    Path(own + str(current_rank().rank)).touch()
    until(lambda: all(Path(other + str(rank)).exists() for rank in range(2)), "the other gang to start")
    total = torch.tensor(float(len(own)))
    dist.all_reduce(total)
    return total.item()


class NeedsTwoError(Exception):
    """Its __init__ asks for more than its args hold."""

    def __init__(self, what: str, number: int) -> None:
        super().__init__(f"{what} {number}")


class SimpleError(Exception):
    """A user's own exception."""


def fail_on_rank_1(how: str) -> None:  # noqa: C901 - one way to fail after the other
    """Rank 1 fails in its own way; rank 0 waits for it in a collective, for as long as it takes."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    if current_rank().rank == 0:
        if how == "deaf survivor":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
        dist.all_reduce(torch.ones(1))
    print(f"about to fail: {how}")
    match how:
        case "own exception" | "deaf survivor":
            raise SimpleError("the batch is spoilt")
        case "exception with a demanding __init__":
            raise NeedsTwoError("code", 7)
        case "unpicklable exception":
            error = SimpleError("code 7")
            error.lock = threading.Lock()  # type: ignore[attr-defined]
            raise error
        case "closes its group first":
            dist.destroy_process_group()
            time.sleep(0.2)
            raise SimpleError("the batch is spoilt")
        case "leaves early":
            sys.exit("no such file")
        case "exit code":
            os._exit(3)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "crash":
            ctypes.string_at(0)


def train_for_ever(started: str) -> None:
    """Until something ends it."""
    Path(started + str(current_rank().rank)).touch()
    while True:
        time.sleep(0.1)


def fail_when_told(started: str, told: str) -> None:
    """Rank 1 fails, but not before its time."""
    Path(started + str(current_rank().rank)).write_text(f"{os.getppid()} {os.getpid()}")
    while current_rank().rank == 0 or not Path(told).exists():
        time.sleep(0.05)
    raise SimpleError("told to")


def linger_at_exit() -> int:
    """Deliver, and then do not leave."""
    import atexit

    atexit.register(time.sleep, 600)
    return current_rank().rank


def load_in_workers(start_method: str) -> float:
    """Sum a dataset through loader processes."""
    from torch.utils.data import DataLoader

    num_workers = 1 if start_method == "spawn" else 2  # each imports torch anew
    loader = DataLoader(_Squares(), batch_size=4, num_workers=num_workers, multiprocessing_context=start_method)
    return float(sum(batch.sum() for batch in loader))


def return_a_lock(path: str) -> object:
    """All is trained, and saved, when it turns out that nobody can have the result."""
    import torch.distributed

    rank = current_rank()
    rank.checkpoint.save({"step": 1}, 1)
    with Path(path).open("a") as file:
        file.write(f"{rank.rank}\n")
    torch.distributed.barrier()  # else one may be ended before it has begun
    return threading.Lock() if rank.rank == 1 else rank.rank


def lose_a_worker(folder: str) -> int:
    """Rank 1 stays until its worker is taken away; the others then have to start again."""
    rank = current_rank()
    Path(folder, f"started-{rank.world_size}-{rank.rank}").touch()
    while rank.world_size == 2:
        time.sleep(0.05)
    results.DaskResultsHandler().submit_result("ended.txt", "ended")
    return 10 + rank.rank


class _Squares:
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return index * index


# ---- The tests


def test_positional_arguments_results_in_rank_order_and_an_all_reduce(client: Client) -> None:
    futures = dispatch.run(client, weighted_sum, 5, x=1)
    assert len(futures) == 2
    assert futures.result() == [(0, 56.0), (1, 56.0)]
    assert [future.result() for future in futures] == [(0, 56.0), (1, 56.0)]
    assert futures.exception() is None


def test_two_identical_calls_train_twice(client: Client, tmp_path: Path) -> None:
    path = str(tmp_path / "calls")
    first = dispatch.run(client, count_call, path).result()
    second = dispatch.run(client, count_call, path).result()
    assert sorted(Path(path).read_text().split()) == ["0", "0", "1", "1"]
    assert not set(first) & set(second)


def test_ranks_see_the_variables_of_plain_pytorch(client: Client) -> None:
    first, second = dispatch.run(client, environment_of_rank, pass_local_rank=True).result()
    assert [first[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")] == ["0", "0", "2", "1"]
    assert [second["RANK"], second["GROUP_RANK"], second["argument"]] == ["1", "1", "0"]
    assert first["MASTER_PORT"] == second["MASTER_PORT"]
    assert first["threads"] == str(max(1, len(os.sched_getaffinity(0)) // 2))


def test_several_ranks_per_worker(client: Client) -> None:
    results = dispatch.run(client, weighted_sum, 1, gang=Gang(ranks_per_worker=2)).result()
    assert results == [(rank, 1111.0) for rank in range(4)]


def test_ranks_can_be_told_apart_by_what_the_system_shows_of_them(client: Client) -> None:
    names = dispatch.run(client, Path("/proc/self/comm").read_text).result()
    assert names == ["rank 0/2\n", "rank 1/2\n"]


def test_a_gang_runs_beside_another_on_one_cluster(client: Client, tmp_path: Path) -> None:
    own, other = str(tmp_path / "a"), str(tmp_path / "another")
    one = dispatch.run(client, meet, own, other)
    two = dispatch.run(client, meet, other, own)
    assert one.result() == [2.0 * len(own)] * 2
    assert two.result() == [2.0 * len(other)] * 2


def test_a_gang_leaves_no_connection_open(client: Client) -> None:
    assert dispatch.run(client, os.getpid).result()
    gc.collect()
    gc.disable()  # a large gang's connections must not wait for it
    try:
        num_open = num_open_files()
        assert dispatch.run(client, os.getpid).result()
        until(lambda: num_open_files() <= num_open, "the gang's connections to be closed")
    finally:
        gc.enable()


def test_closures_travel_by_value(client: Client) -> None:
    number = 41
    assert dispatch.run(client, lambda: number + current_rank().world_size).result() == [43, 43]


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_data_loader_workers_in_a_rank(client: Client, start_method: str) -> None:
    assert dispatch.run(client, load_in_workers, start_method).result() == [285.0, 285.0]


@pytest.mark.parametrize("how", ["own exception", "closes its group first", "deaf survivor"])
def test_the_failing_ranks_own_exception_is_raised(client: Client, how: str) -> None:
    with pytest.raises(SimpleError, match="the batch is spoilt") as caught:
        dispatch.run(client, fail_on_rank_1, how, gang=ONCE).result()
    blamed = caught.value.__cause__
    assert isinstance(blamed, GangError)
    assert blamed.rank == 1
    assert blamed.worker is not None
    assert "127.0.0.3" in blamed.worker
    assert "fail_on_rank_1" in blamed.rank_traceback
    assert f"about to fail: {how}" in blamed.log_tail


def test_an_exception_with_a_demanding_init_keeps_its_type(client: Client) -> None:
    with pytest.raises(NeedsTwoError, match="code 7"):
        dispatch.run(client, fail_on_rank_1, "exception with a demanding __init__", gang=ONCE).result()


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("unpicklable exception", "SimpleError: code 7"),
        ("leaves early", "SystemExit: exit code 1 .no such file"),
        ("exit code", "exit code 3"),
        ("crash", "SIGSEGV"),
    ],
)
def test_other_ends_of_a_rank_are_named(client: Client, how: str, cause: str) -> None:
    with pytest.raises(GangError, match=cause) as caught:
        dispatch.run(client, fail_on_rank_1, how, gang=ONCE).result()
    assert caught.value.rank == 1
    assert not isinstance(caught.value, WorkerLostError)
    if how == "crash":
        assert "in fail_on_rank_1" in caught.value.log_tail  # faulthandler says where


def test_a_result_that_cannot_be_sent_ends_the_gang_at_once(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "runs"
    with pytest.raises(TypeError, match="returned a lock that cannot be pickled") as caught:
        dispatch.run(client, return_a_lock, str(path)).result()
    assert isinstance(caught.value.__cause__, GangError)
    assert caught.value.__cause__.rank == 1
    assert sorted(path.read_text().split()) == ["0", "1"]


def test_a_killed_rank_counts_as_infrastructure(client: Client) -> None:
    with pytest.raises(WorkerLostError, match="SIGKILL") as caught:
        dispatch.run(client, fail_on_rank_1, "killed", gang=ONCE).result()
    assert caught.value.rank == 1


def test_cancel_ends_all_ranks(client: Client, tmp_path: Path) -> None:
    started = str(tmp_path / "rank")
    futures = dispatch.run(client, train_for_ever, started, gang=ONCE)
    until(lambda: all(Path(started + rank).exists() for rank in "01"), "the ranks to start")
    assert futures.cancel()
    with pytest.raises(CancelledError):
        futures.result()
    assert not futures.cancel()


def test_what_cannot_be_pickled_is_named_before_anything_starts(client: Client) -> None:
    with pytest.raises(TypeError, match="argument 1"):
        dispatch.run(client, weighted_sum, 5, threading.Lock())


def test_nccl_without_gpus_is_refused(client: Client) -> None:
    with pytest.raises(ValueError, match=r"no GPU for rank 0 on .*127\.0\.0\.2.*, rank 1"):
        dispatch.run(client, weighted_sum, 5, backend="nccl").result()


def test_a_client_that_has_closed_itself_is_a_lost_scheduler(cluster: Cluster) -> None:
    with Client(cluster.address) as client:
        agents = dask_agents.DaskAgents(client)
        assert len(agents.present()) == 2
    with pytest.raises(ConnectionError, match="the Dask client has closed itself"):
        agents.present()


def test_a_gang_that_shrank_has_the_results_of_its_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with nothing_left_behind(), dask_cluster(tmp_path) as cluster, Client(cluster.address) as client:
        futures = dispatch.run(client, lose_a_worker, str(tmp_path), gang=Gang(min_workers=1))
        until(lambda: all((tmp_path / f"started-2-{rank}").exists() for rank in "01"), "the ranks to start")
        cluster.kill_worker(1)
        assert futures.result() == [10]
    assert futures.exception() is None
    assert [future.exception() is None for future in futures] == [True, False]
    with pytest.raises(GangStartError, match="there was no rank 1"):
        futures[1].result()
    results.DaskResultsHandler().process_results(tmp_path / "results", futures)
    assert (tmp_path / "results" / "ended.txt").read_text() == "ended"
    assert "lose_a_worker: ended with 1 of 2 workers, as min_workers allows" in capfd.readouterr().err


PRETEND = """
import os
from flytekitplugins.daskpytorch.node import hardware as node

node.gpus_here = lambda: node.FoundGpus({gpu: "pretended" for gpu in os.environ["PRETENDED_GPUS"].split()})
"""


@contextlib.contextmanager
def workers_with_gpus(folder: Path, *gpus: str) -> Iterator[Client]:
    """A cluster each of whose workers takes itself to be on a host with these GPUs."""
    (folder / "pretend.py").write_text(PRETEND)
    preload = {"DASK_DISTRIBUTED__WORKER__PRELOAD": repr([PRELOAD, str(folder / "pretend.py")])}
    environments = {index: {**preload, "PRETENDED_GPUS": here} for index, here in enumerate(gpus)}
    with (
        nothing_left_behind(),
        dask_cluster(folder, len(gpus), worker_environments=environments) as cluster,
        Client(cluster.address) as client,
    ):
        yield client


def place_of_rank(*_: object) -> tuple[int, str, str]:
    """Its own GPU, and its place on its worker."""
    return current_rank().rank, os.environ["CUDA_VISIBLE_DEVICES"], os.environ["LOCAL_WORLD_SIZE"]


def test_auto_is_a_rank_for_each_gpu_of_the_workers(tmp_path: Path) -> None:
    """The two workers are on one host, and share its four GPUs."""
    gloo = Gang(backend="gloo")
    with workers_with_gpus(tmp_path, "0 1 2 3", "0 1 2 3") as client:
        futures = dispatch.run(client, place_of_rank, gang=gloo)
        assert len(futures) == 4
        assert futures.result() == [(0, "0", "2"), (1, "1", "2"), (2, "2", "2"), (3, "3", "2")]
        models = dispatch.map(client, place_of_rank, ["a", "b"], gang=gloo)
        assert {model.result()[2] for model in models} == {"2"}
        assert len(dispatch.run(client, place_of_rank, gang=Gang(backend="gloo", ranks_per_worker=1)).result()) == 2


def test_auto_with_unequal_numbers_of_gpus_is_an_error(tmp_path: Path) -> None:
    with workers_with_gpus(tmp_path, "0 1 3", "2") as client:
        for start in (
            lambda gang: dispatch.run(client, place_of_rank, gang=gang),
            lambda gang: dispatch.map(client, place_of_rank, ["a"], gang=gang),
        ):
            with pytest.raises(
                ValueError, match=r"not equally many: there would be 1 rank on tcp://\S+, 2 ranks on tcp://"
            ):
                start(Gang(backend="gloo"))
        assert len(dispatch.run(client, place_of_rank, gang=Gang(backend="gloo", ranks_per_worker=1)).result()) == 2


def test_each_worker_is_asked_for_its_gpus_once(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    run = client.run
    monkeypatch.setattr(client, "run", lambda *args, **kwargs: asked.append(kwargs) or run(*args, **kwargs))
    for _ in range(3):
        assert dispatch.run(client, current_rank_number).result() == [0, 1]
    assert len(asked) == 2


def current_rank_number() -> int:
    return current_rank().rank


def test_a_suspended_worker_does_not_hold_up_the_end(tmp_path: Path) -> None:
    started, told = str(tmp_path / "rank"), tmp_path / "told"
    with nothing_left_behind(), dask_cluster(tmp_path) as cluster, Client(cluster.address) as client:
        futures = dispatch.run(client, fail_when_told, started, str(told), gang=Gang(max_restarts=0, grace_period=2))
        notes = [Path(started + rank) for rank in "01"]
        until(lambda: all(note.exists() and note.read_text() for note in notes), "the ranks to start")
        fork_server, rank = (psutil.Process(int(pid)) for pid in notes[0].read_text().split())
        worker = fork_server.parent()
        assert worker is not None
        worker.suspend()
        told.touch()
        with pytest.raises(SimpleError, match="told to"):
            futures.result()
        worker.resume()  # now it hears that all is over, and ends its rank
        until(lambda: not rank.is_running(), "the rank of the suspended worker to end")


def test_a_rank_that_does_not_leave_is_ended(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brain, "MAX_LEAVE_WAIT", 1.0)
    assert dispatch.run(client, linger_at_exit).result() == [0, 1]


def test_a_scheduler_that_is_busy_for_a_while_is_not_lost(cluster: Cluster, client: Client) -> None:
    cluster.scheduler.send_signal(signal.SIGSTOP)
    wake = threading.Timer(2 * dask_agents.LOOK_TIMEOUT, cluster.scheduler.send_signal, [signal.SIGCONT])
    wake.start()
    try:
        assert dispatch.run(client, weighted_sum, 1).result() == [(0, 11), (1, 11)]
    finally:
        wake.join()


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


def test_workers_with_another_torch_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "site" / "torch-0.0.1.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 0.0.1\n")
    environments = {1: {"PYTHONPATH": str(other.parent)}}
    with (
        dask_cluster(tmp_path, worker_environments=environments) as cluster,
        Client(cluster.address) as client,
        pytest.raises(ValueError, match=r"has torch 0\.0\.1, this process"),
    ):
        dispatch.run(client, weighted_sum, 5).result()


def test_a_cluster_without_workers_is_an_error(tmp_path: Path) -> None:
    with (
        dask_cluster(tmp_path, 0) as cluster,
        Client(cluster.address) as client,
        pytest.raises(GangStartError, match="has 0 workers"),
    ):
        dispatch.run(client, weighted_sum, 5)


def test_a_local_cluster_in_this_process_leaves_nothing() -> None:
    from flytekitplugins.daskpytorch.dask import cluster as clusters

    fork_client.shutdown()  # one that another test has left has no mark
    with nothing_left_behind() as mark, clusters.opened(num_workers=2) as client:
        assert dispatch.run(client, weighted_sum, 5, x=1).result() == [(0, 56.0), (1, 56.0)]
        assert marked(mark)


def test_a_gang_does_not_wait_for_a_worker_that_is_being_scaled_away() -> None:
    with LocalCluster(n_workers=2, processes=False, dashboard_address=None) as local, Client(local) as client:
        local.scale(1)
        assert dask_agents.DaskAgents(client).num_wanted == 1
        assert dispatch.run(client, weighted_sum, 5).result() == [(0, 5.0)]


def test_a_worker_that_is_closing_counts_no_more(client: Client) -> None:
    found = client.scheduler_info()
    leaving, *staying = found["workers"]
    found["workers"][leaving]["status"] = "closing_gracefully"
    assert list(dask_agents._addresses(client, found)) == staying


def train_alone(loss: float) -> int:
    torch.optim.SGD([torch.zeros(1, requires_grad=True)]).step()
    current_rank().log({"loss": loss}, step=1)
    return current_rank().rank


@pytest.mark.parametrize("hints", [True, False])
def test_what_looks_forgotten_is_said_unless_nobody_wants_to_know(
    client: Client, capfd: pytest.CaptureFixture[str], *, hints: bool
) -> None:
    gang = Gang(hints=hints)
    assert dispatch.run(client, train_alone, float("nan"), gang=gang).result() == [0, 1]
    said = capfd.readouterr().err
    assert said.count("logged loss=nan at step 1") == hints
    assert said.count("has returned without a single collective among 2 ranks") == hints
    assert dispatch.run(client, weighted_sum, 5, gang=gang).result() == [(0, 55.0), (1, 55.0)]
    assert "A hint" not in capfd.readouterr().err


def test_an_agent_does_not_wait_for_its_workers_event_loop() -> None:
    free = threading.Event()
    with LocalCluster(n_workers=1, processes=False, dashboard_address=None) as local:
        worker = local.workers[0]
        worker.loop.add_callback(free.wait, 60)
        with dask_agents._farewell(worker):
            pass
        assert not free.is_set()
        free.set()
    assert not worker.plugins  # and the worker could close


def test_a_worker_whose_python_is_ending_says_nothing_of_an_agent_that_it_cannot_wait_for() -> None:
    """As at a second Ctrl-C: there are no more threads to wait in."""

    async def close_late(leaving: dask_agents._Farewell) -> None:
        await asyncio.get_running_loop().shutdown_default_executor()
        await leaving.teardown(None)  # type: ignore[arg-type]

    with contextlib.closing(dask_agents._Farewell()) as leaving:
        asyncio.run(close_late(leaving))
        assert os.read(leaving.readable, 8) == b"."


def what_the_fork_server_has_imported() -> tuple[bool, int]:
    return "torch._dynamo" in sys.modules, os.getppid()


def what_training_finds_imported() -> tuple[bool, int]:
    """It imports the rest, which the fork server does then, too."""
    found = what_the_fork_server_has_imported()
    import_module("torch._dynamo")
    return found


def imports_torch(server: psutil.Process) -> bool:
    return any("libtorch" in file.path for file in server.memory_maps())


def num_inherited_folders() -> int:
    """Temporary folders that the first rank to end would remove for all others."""
    cleanup = tempfile.TemporaryDirectory._cleanup
    return sum(entry.func == cleanup for entry in weakref.finalize._registry.values())


@pytest.mark.parametrize(
    "module",
    [
        "flytekitplugins.daskpytorch.preload",
        pytest.param("flytekitplugins.daskpytorch.flyte.preload", marks=pytest.mark.slow),
        pytest.param("flyteplugins.daskpytorch.preload", marks=pytest.mark.slow),
    ],
)
def test_workers_may_start_their_fork_servers_ahead(tmp_path: Path, module: str) -> None:
    preload = {"DASK_DISTRIBUTED__WORKER__PRELOAD": module}
    with (
        nothing_left_behind(),
        dask_cluster(tmp_path, worker_environments={0: preload, 1: preload}, is_warm=False) as cluster,
        Client(cluster.address) as client,
    ):
        servers = [child for index in range(2) for child in cluster.worker_process(index).children()]
        assert len(servers) == 2
        until(lambda: all(map(imports_torch, servers)), "the fork servers to be ready before any gang")
        assert {pid for _, pid in dispatch.run(client, what_the_fork_server_has_imported).result()} == {
            server.pid for server in servers
        }


def memory_settings() -> tuple[str | None, bool]:
    """The rank's own, and whether the process that forked it was started with them."""
    own = os.environ.get("MALLOC_TRIM_THRESHOLD_")
    return own, b"MALLOC_TRIM_THRESHOLD_" in Path(f"/proc/{os.getppid()}/environ").read_bytes()


def test_ranks_do_not_inherit_the_nannys_settings_of_the_allocator(client: Client) -> None:
    assert client.submit(lambda: "MALLOC_TRIM_THRESHOLD_" in os.environ, pure=False).result()
    assert dispatch.run(client, memory_settings).result() == [(None, False)] * 2


@pytest.mark.slow
def test_later_ranks_come_from_a_fork_server_that_has_imported_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flytekitplugins.daskpytorch.dask import cluster as clusters

    monkeypatch.setenv("DASKPYTORCH_LEISURE", "0")
    start_cold(monkeypatch)
    with nothing_left_behind(), clusters.opened(num_workers=2) as client:
        (first, server), _ = dispatch.run(client, what_training_finds_imported).result()
        assert not first
        until(lambda: run_after_a_pause(client, what_the_fork_server_has_imported)[0][0], "its imports")
        assert dispatch.run(client, num_inherited_folders).result() == [0, 0]
        os.kill(server, signal.SIGKILL)  # the next gang has a new one
        assert dispatch.run(client, weighted_sum, 5, x=1).result() == [(0, 56.0), (1, 56.0)]
