"""What happens when a rank fails or hangs: cases 1 to 19 of the project's list of faults, by number."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from distributed import Client

import fault_training as ft
from flytekitplugins.daskpytorch import Gang, GangError, GangHungError, WorkerLostError, dispatch
from processes import Cluster, dask_cluster, nothing_left_behind

pytestmark = pytest.mark.timeout(90)

Launch = Callable[..., ft.Watched]
MAX_SECONDS = 15.0
"""From a fault to the next generation, or to the error: far below any time-out of gloo or NCCL, even on a busy host."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two workers on two hosts, for all tests that leave them alive."""
    with (
        nothing_left_behind(),
        dask_cluster(tmp_path_factory.mktemp("cluster"), hosts=["127.0.0.2", "127.0.0.3"]) as running,
    ):
        yield running


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    with Client(cluster.address) as connected:
        yield connected


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    with ft.watching(tmp_path / "traces") as launcher:
        yield launcher


def check_recovered(watched: ft.Watched, starts: list[int]) -> None:
    """The gang started again where it should, soon, and its result is that of an undisturbed run."""
    assert watched.futures.result(60) == [ft.expected()] * 2
    assert watched.starts(0) == watched.starts(1) == starts
    if len(starts) > 1:
        assert watched.formed_at[-1] - watched.broke_at() < MAX_SECONDS


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        pytest.param("raise", "SpoiltError: the batch is spoilt", id="1"),
        pytest.param("close and raise", "SpoiltError: the batch is spoilt", id="3"),
        pytest.param("demanding", "DemandingError: code 7", id="5-init"),
        pytest.param("unpicklable", "SpoiltError: code 7", id="5-unpicklable"),
        pytest.param("sys.exit", "SystemExit: 0", id="6"),
        pytest.param("os._exit", "exit code 3", id="7"),
        pytest.param("SIGKILL", "SIGKILL", id="8"),
        pytest.param("SIGSEGV", "SIGSEGV", id="9-segmentation"),
        pytest.param("SIGABRT", "SIGABRT", id="9-abort"),
        pytest.param("MemoryError", "MemoryError", id="10"),
        pytest.param("KeyboardInterrupt", "KeyboardInterrupt", id="11-interrupt"),
        pytest.param("asynchronous", "KeyboardInterrupt", id="11-asynchronous"),
        pytest.param("ignore SIGTERM", "SpoiltError", id="12"),
    ],
)
def test_a_rank_that_fails_once_costs_a_restart(client: Client, launch: Launch, fault: str, said: str) -> None:
    watched = launch(client, fault)
    check_recovered(watched, [0, ft.SAVED_AT])
    assert any(f"rank 1 on tcp://127.0.0.3" in note and said in note for note in watched.notes), watched.notes
