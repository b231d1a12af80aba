"""What works where flytekit has no release: gangs on any Dask cluster. Run by tests/matrix.py in such a Python."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest
import torch
from distributed import Client, LocalCluster

import flytekitplugins.daskpytorch
from flytekitplugins.daskpytorch import Gang, current_rank, dispatch

pytestmark = pytest.mark.skipif(find_spec("flytekit") is not None, reason="flytekit is here")


def total(start: int) -> float:
    rank = current_rank()
    rank.checkpoint.save({"weights": torch.ones(1000)}, step=0)
    value = torch.tensor(float(start + rank.rank))
    torch.distributed.all_reduce(value)
    return value.item()


def test_a_gang_trains_on_a_dask_cluster() -> None:
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster) as client:
        futures = dispatch.run(client, total, 10, gang=Gang(max_restarts=0))
        assert futures.result() == [21.0, 21.0]


def test_many_models_train() -> None:
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster) as client:
        assert dispatch.map(client, total, [1, 2]).result() == [1.0, 2.0]


def test_a_task_type_says_why_it_is_not_there() -> None:
    with pytest.raises(ImportError, match=r"DaskDDP needs flytekit.*no release for Python 3\.13"):
        _ = flytekitplugins.daskpytorch.DaskDDP
    assert "flytekit" not in sys.modules
