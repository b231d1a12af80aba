"""`dispatch.map` trains many models at once on a real cluster, each as a gang."""

import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, as_completed
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from distributed import Client

from flytekitplugins.daskpytorch import Gang, GangError, GangStartError, Observer, Shape, current_rank, dispatch
from processes import Cluster, dask_cluster, nothing_left_behind, until

NUM_WORKERS = 4


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Four workers, for all tests that leave them alive."""
    with nothing_left_behind(), dask_cluster(tmp_path_factory.mktemp("cluster"), NUM_WORKERS) as running:
        yield running


# ---- What the ranks run


def reduced(experiment: tuple[int, int]) -> tuple[int, int, float]:
    """What only a gang of the right size knows."""
    value, _ = experiment
    total = torch.tensor(value * 10.0 ** current_rank().rank)
    dist.all_reduce(total)
    return value, current_rank().world_size, total.item()


def raise_if_odd(number: int) -> int:
    if number % 2:
        raise LookupError(f"{number} is odd")
    return number


def wait(path: str) -> str:
    """Until the file is there, or for ever where there is no name."""
    Path(f"{path}-started").touch()
    while not Path(path).exists():
        time.sleep(0.01)
    return path


def wait_for(experiment: dict[str, str]) -> str:
    return wait(experiment["path"])


# ---- What is done with them


class Started(Observer):
    """The workers of each gang, in the order of the starts."""

    workers: ClassVar[list[list[str]]] = []

    def on_start(self, shape: Shape) -> None:
        self.workers.append([node.worker for node in shape.nodes])


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    monkeypatch.setattr(Started, "workers", found := [])
    return found


def test_the_largest_gang_starts_first_and_results_come_in_the_order_of_the_experiments(
    client: Client, started: list[list[str]]
) -> None:
    experiments = [(1, 1), (2, 4), (3, 2), (4, 1), (5, 2), (6, 1)]
    gang = Gang(observers=(Started,))
    futures = dispatch.map(client, reduced, experiments, workers=lambda experiment: experiment[1], gang=gang)
    sums = {1: 1, 2: 11, 4: 1111}
    expected = [(value, size, value * float(sums[size])) for value, size in experiments]
    assert futures.result() == expected
    assert len(started[0]) == 4
    assert [future.result() for future in futures] == expected
    assert sorted(future.result() for future in as_completed(futures, 1)) == sorted(expected)
    assert futures.done()
    assert futures.exception() is None
    assert not futures.cancel()


def test_a_failed_experiment_fails_alone_with_its_own_error(client: Client) -> None:
    futures = dispatch.map(client, raise_if_odd, range(6), gang=Gang(max_restarts=0))
    with pytest.raises(LookupError, match="1 is odd") as caught:
        futures.result()
    assert isinstance(caught.value.__cause__, GangError)
    assert caught.value.__notes__ == ["in experiment 1 of 6"]
    assert [future.result() for future in futures if future.exception() is None] == [0, 2, 4]
    assert [str(future.exception()) for future in futures[1::2]] == ["1 is odd", "3 is odd", "5 is odd"]


def test_experiments_that_cannot_be_packed_any_more_fail_alone(client: Client, tmp_path: Path) -> None:
    experiments: list[dict[str, Any]] = [{"path": str(tmp_path / str(n))} for n in range(2 * NUM_WORKERS + 1)]
    futures = dispatch.map(client, wait_for, experiments)
    until(lambda: sum(Path(f"{e['path']}-started").exists() for e in experiments) == NUM_WORKERS, "the models to start")
    for experiment in experiments[NUM_WORKERS:-1]:
        experiment["changed"] = (line for line in "ab")
    for experiment in experiments:
        Path(experiment["path"]).touch()
    assert futures[-1].result(60) == experiments[-1]["path"]  # the others have left it their workers
    assert [future.result() for future in futures[:NUM_WORKERS]] == [e["path"] for e in experiments[:NUM_WORKERS]]
    for index in range(NUM_WORKERS, 2 * NUM_WORKERS):
        error = futures[index].exception()
        assert isinstance(error, TypeError)
        assert "wait_for cannot be sent to the ranks" in str(error)
        assert error.__notes__ == [f"in experiment {index} of {len(experiments)}"]


def test_33_one_of_many_is_cancelled(client: Client, tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in "abcdef"]
    futures = dispatch.map(client, wait, paths)
    until((tmp_path / "b-started").exists, "the models to start")
    assert futures[5].cancel()  # it waits
    assert futures[5].cancelled()
    assert futures[1].cancel()  # it trains
    with pytest.raises(CancelledError):
        futures[1].result()
    for path in paths:
        Path(path).touch()
    assert [futures[index].result() for index in (0, 2, 3, 4)] == [paths[index] for index in (0, 2, 3, 4)]
    assert not (tmp_path / "f-started").exists()
    assert not futures[1].cancel()


def test_all_are_cancelled_and_leave_their_workers(client: Client, tmp_path: Path) -> None:
    futures = dispatch.map(client, wait, [str(tmp_path / str(number)) for number in range(8)])
    until((tmp_path / "3-started").exists, "the models to start")
    assert futures.cancel()
    found = futures.result(return_exceptions=True)
    assert all(isinstance(error, CancelledError) for error in found)
    assert not (tmp_path / "4-started").exists()
    assert dispatch.map(client, raise_if_odd, [2] * 4).result() == [2] * 4


def test_what_cannot_be_done_is_refused_at_once(client: Client) -> None:
    with pytest.raises(GangStartError, match=r"experiment 1 takes 5 workers; the cluster at .* has 4"):
        dispatch.map(client, raise_if_odd, [2, 4], workers=lambda number: number + 1)
    with pytest.raises(ValueError, match="experiment 0 takes workers=0: must be a whole number from 1 up"):
        dispatch.map(client, raise_if_odd, [2], workers=0)
    with pytest.raises(TypeError, match="cannot be sent to the ranks"):
        dispatch.map(client, raise_if_odd, [(line for line in "ab")])
    assert dispatch.map(client, raise_if_odd, []).result() == []


def test_a_lost_worker_is_replaced_by_a_free_one(
    cluster: Cluster, client: Client, tmp_path: Path, started: list[list[str]]
) -> None:
    """The last one on that cluster: it takes a worker away."""
    paths = [str(tmp_path / name) for name in ("pair", "single", "other")]
    gang = Gang(observers=(Started,))
    futures = dispatch.map(client, wait, paths, workers=lambda path: 2 if path.endswith("pair") else 1, gang=gang)
    until(lambda: all(Path(f"{path}-started").exists() for path in paths), "the models to start")
    (tmp_path / "single").touch()
    assert futures[1].result() == paths[1]
    (tmp_path / "pair-started").unlink()
    lost = next(i for i in range(NUM_WORKERS) if _address_of(client, f"worker-{i}") in max(started, key=len))
    cluster.kill_worker(lost)
    until((tmp_path / "pair-started").exists, "the pair to start again")
    for name in ("pair", "other"):
        (tmp_path / name).touch()
    assert futures.result() == paths


def _address_of(client: Client, name: str) -> str | None:
    workers = client.sync(client.scheduler.identity)["workers"]
    return next((address for address, info in workers.items() if info["name"] == name), None)
