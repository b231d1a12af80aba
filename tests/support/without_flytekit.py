"""Gangs on any Dask cluster, in a Python for which flytekit has no release. `matrix.py` runs this program."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from distributed import Client, LocalCluster

import flytekitplugins.daskpytorch
from flytekitplugins.daskpytorch import Gang, current_rank, dispatch

pytestmark = pytest.mark.skipif(find_spec("flytekit") is not None, reason="flytekit is here")


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as connected,
    ):
        yield connected


def total(start: int) -> float:
    value = torch.tensor(float(start + current_rank().rank))
    torch.distributed.all_reduce(value)
    return value.item()


def count_sharded(steps: int) -> tuple[int, int]:
    """From which step it went on, and the sum of all steps; a rank is killed once the second's checkpoint is kept."""
    rank, state = current_rank(), {"sum": torch.zeros(1)}
    first = rank.checkpoint.load_sharded(state) or 0
    for step in range(first + 1, steps + 1):
        state["sum"] += step
        rank.checkpoint.save_sharded(state, step)
        if first == 0 and step == 2:
            die_once_kept(step)
    return first, int(state["sum"])


def die_once_kept(step: int) -> None:
    rank = current_rank()
    while all(kept.step != step for kept in rank.checkpoint.list()):
        time.sleep(0.01)
    torch.distributed.barrier()
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.barrier()


def test_a_gang_trains_on_a_dask_cluster(client: Client) -> None:
    assert dispatch.run(client, total, 10, gang=Gang(max_restarts=0)).result() == [21.0, 21.0]


def test_many_models_train(client: Client) -> None:
    assert dispatch.map(client, total, [1, 2]).result() == [1.0, 2.0]


def test_a_gang_goes_on_from_its_sharded_checkpoint_and_so_does_the_next(client: Client, tmp_path: Path) -> None:
    gang = Gang(checkpoint_uri=str(tmp_path), key="counting")
    assert dispatch.run(client, count_sharded, 4, gang=gang).result() == [(2, 10), (2, 10)]
    assert dispatch.run(client, count_sharded, 5, gang=gang).result() == [(4, 15), (4, 15)]


def test_a_task_type_says_why_it_is_not_there() -> None:
    with pytest.raises(ImportError, match=r"DaskDDP needs flytekit.*no release for Python 3\.13"):
        _ = flytekitplugins.daskpytorch.DaskDDP
    assert "flytekit" not in sys.modules
