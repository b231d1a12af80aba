"""A gang leaves a worker out whose GPU fails its check. Workers and ranks are real, GPUs and NVML are simulated."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

import fake_gpus
from fake_gpus import SOUND, workers_with_gpus
from flytekitplugins.daskpytorch import Gang, WorkerLostError, current_rank, dispatch
from flytekitplugins.daskpytorch.rank import own_gpu

WORKERS = [{"0": "GPU-a", "1": "GPU-b"}, {"2": "GPU-c", "3": "GPU-d"}]

if "RANK" in os.environ:  # in ranks, which import this module before they wait for NVML
    own_gpu.DRIVER_TIMEOUT = 1.0


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file with NVML's answers."""
    return tmp_path_factory.mktemp("driver") / "gpus"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, file: Path) -> Iterator[Client]:
    with workers_with_gpus(tmp_path_factory.mktemp("cluster"), file, WORKERS) as client:
        yield client


def describe(file: Path, **faults: dict[str, int]) -> None:
    """Write NVML's answers: all GPUs are sound, except for those that are named by their letters."""
    fake_gpus.describe(file, {f"GPU-{letter}": {**SOUND, **faults.get(letter, {})} for letter in "abcd"})


def gpu_of_rank() -> str:
    """The GPU that this rank sees."""
    return os.environ["CUDA_VISIBLE_DEVICES"]


def num_ranks(_: str) -> int:
    """The ranks of a model."""
    return current_rank().world_size


def refuse_gpu_2(index: int) -> None:
    """The user's check."""
    if os.environ["CUDA_VISIBLE_DEVICES"] == "2":
        raise ArithmeticError(f"device {index} is slow")


def gpus_of_gang(client: Client, **settings: Any) -> list[str]:
    """The GPUs of a gang with a rank on each worker."""
    gang = Gang(backend="gloo", ranks_per_worker=1, **settings)
    return sorted(dispatch.run(client, gpu_of_rank, gang=gang).result())


def test_a_gang_goes_on_without_a_worker_whose_gpu_has_a_fault(
    client: Client, file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    describe(file)
    assert gpus_of_gang(client) == ["0", "2"]
    everywhere = dispatch.run(client, gpu_of_rank, gang=Gang(backend="gloo")).result()
    assert sorted(everywhere) == ["0", "1", "2", "3"]  # the workers come in any order
    models = dispatch.map(client, num_ranks, ["a", "b"], gang=Gang(backend="gloo"))
    assert models.result() == [2, 2]  # a rank for each GPU of a worker
    assert "starting again" not in capfd.readouterr().err

    describe(file, c={"ecc": 2})
    assert gpus_of_gang(client, min_workers=1) == ["0"]
    told = capfd.readouterr().err
    assert f"GPU 2 (UUID GPU-c) of host {socket.gethostname()} failed: the check before its use found: 2 unc" in told
    assert "Traceback" not in told  # all of it would be this package's
    assert gpus_of_gang(client, gpu_check="off") == ["0", "2"]

    describe(file)
    assert gpus_of_gang(client, gpu_check=refuse_gpu_2, min_workers=1) == ["0"]
    told = capfd.readouterr().err
    assert "gpu_check=refuse_gpu_2 raised ArithmeticError: device 0 is slow" in told
    assert "in refuse_gpu_2\n    raise ArithmeticError(" in told


def test_a_gpu_with_a_fault_ends_a_gang_that_needs_all_workers(client: Client, file: Path) -> None:
    describe(file, c={"code": 15})
    with pytest.raises(WorkerLostError, match=r"GPU 2 \(UUID GPU-c\) of host .*GPU is lost") as error:
        gpus_of_gang(client, max_restarts=1)
    assert error.value.kind == "lost"


def test_a_driver_that_hangs_is_an_error_of_the_infrastructure(client: Client, file: Path) -> None:
    describe(file, a={"hangs": 1})
    with pytest.raises(WorkerLostError, match=r"GPU 0 \(UUID GPU-a\) of host .* did not answer within 1 s"):
        gpus_of_gang(client, max_restarts=0)
