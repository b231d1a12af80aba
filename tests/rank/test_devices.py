"""Each rank gets its own GPU and the nearest NUMA node. The GPUs and the kernel's answers are simulated."""

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from flytekitplugins.daskpytorch.context import RankContext
from flytekitplugins.daskpytorch.protocol.placement import Node, place_ranks
from flytekitplugins.daskpytorch.rank import main

NODE = Node(worker="w", host="h", num_cores=8, gpus=("2", "3"), gpu_names=(), interface=None, versions={})


@pytest.fixture
def made_current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The GPUs that were made current."""
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(main, "stay_beside", lambda _: None)
    return current


@pytest.mark.parametrize(
    ("devices", "backend", "taken", "current"),
    [
        ("own", "nccl", "cuda:0", [0]),
        ("all", "nccl", "cuda:1", [1]),
        ("own", "gloo", None, []),  # what is current anyway
        ("all", "gloo", None, [1]),
    ],
)
def test_the_ranks_own_gpu_is_the_current_one(
    devices: Literal["own", "all"], backend: str, taken: str | None, current: list[int], made_current: list[int]
) -> None:
    [[_, place]] = place_ranks([NODE], 2, devices)
    order: Any = SimpleNamespace(place=place, job=SimpleNamespace(backend=backend))
    device = main._take_device(order)
    assert (device and str(device), made_current) == (taken, current)


def test_a_rank_without_a_gpu_leaves_cuda_alone(made_current: list[int]) -> None:
    [[place]] = place_ranks([Node(**vars(NODE) | {"gpus": ()})], 1, "all")
    order: Any = SimpleNamespace(place=place, job=SimpleNamespace(backend="gloo"))
    assert main._take_device(order) is None
    assert not made_current


def test_the_context_names_the_ranks_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert RankContext(device_index=1).device == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert RankContext(device_index=1).device == torch.device("cuda:1")


# ---- Memory in several nodes


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with two nodes, a core of this one in each; GPU 0 belongs to none, 1 to the first, 2 to the second."""
    first, *_, last = sorted(os.sched_getaffinity(0))
    if first == last:
        pytest.skip("this process may use one core alone")
    for node, cores in enumerate([f"{first},900-902", f"{last}"]):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
    for gpu, node in enumerate([-1, 0, 1]):
        folder = tmp_path / f"bus/pci/devices/0001:{gpu + 0xA0:02x}:00.0"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(pci_domain_id=1, pci_bus_id=device + 0xA0, pci_device_id=0),
    )
    return tmp_path


def cores_beside(device: int, system: Path) -> set[int]:
    """Where a thread then may run, and those that it starts."""
    cores: list[set[int]] = []

    def stay() -> None:
        main.stay_beside(device, system)
        child = threading.Thread(target=lambda: cores.append(os.sched_getaffinity(0)))
        child.start()
        child.join()

    thread = threading.Thread(target=stay)
    thread.start()
    thread.join()
    return cores[0]


def test_a_rank_stays_on_its_gpus_node(system: Path) -> None:
    allowed = os.sched_getaffinity(0)
    assert cores_beside(1, system) == {min(allowed)}
    assert cores_beside(2, system) == {max(allowed)}
    assert os.sched_getaffinity(0) == allowed


def test_a_rank_stays_where_it_is_if_nobody_knows_its_gpus_node(system: Path) -> None:
    allowed = os.sched_getaffinity(0)
    assert cores_beside(0, system) == allowed  # a virtual machine's
    assert cores_beside(7, system) == allowed
    (system / "devices/system/node/node1/cpulist").write_text("950\n")  # none that this container may use
    assert cores_beside(2, system) == allowed


def test_on_a_machine_with_one_node_nobody_asks_for_the_gpus(tmp_path: Path) -> None:
    (tmp_path / "devices/system/node/node0").mkdir(parents=True)
    assert cores_beside(0, tmp_path) == os.sched_getaffinity(0)
