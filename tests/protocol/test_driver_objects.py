"""Objects with the driver's rank and world size are refused, or made again, in the ranks of a gang."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import Linear
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import DataLoader, DistributedSampler

from flytekitplugins.daskpytorch import current_rank
from flytekitplugins.daskpytorch.protocol import pickling


@pytest.fixture(autouse=True)
def _rank_1_of_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")


@pytest.fixture(scope="module", autouse=True)
def _group_of_one() -> Iterator[None]:
    """The driver's, in which the objects are made."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def arrived(value: Any) -> Any:
    """The value as a rank has it."""
    return pickling.loads(pickling.dumps(value))


def sampler(num_replicas: int, rank: int) -> DistributedSampler[int]:
    return DistributedSampler(range(8), num_replicas=num_replicas, rank=rank, shuffle=False)  # type: ignore[arg-type]


def accelerator() -> Any:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.GradientState._reset_state()  # of trainings of other tests
    return accelerate.Accelerator(cpu=True)


def fabric() -> Any:
    return pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)


MADE_IN_DRIVER = {
    "Accelerator": accelerator,
    "AcceleratorState": lambda: accelerator().state,
    "PartialState": lambda: pytest.importorskip("accelerate").PartialState(cpu=True),
    "DataLoaderShard": lambda: accelerator().prepare(DataLoader(range(8))),  # type: ignore[arg-type]
    "DeviceMesh": lambda: init_device_mesh("cpu", (1,)),
    "DistributedDataParallel": lambda: DistributedDataParallel(Linear(2, 2)),
    "DistributedSampler": lambda: sampler(1, 0),
    "Fabric": fabric,
    "TrainingArguments": lambda: pytest.importorskip("transformers").TrainingArguments(use_cpu=True),
    "ZeroRedundancyOptimizer": lambda: ZeroRedundancyOptimizer(Linear(2, 2).parameters(), SGD, lr=0.1),
}


@pytest.mark.parametrize("name", MADE_IN_DRIVER)
def test_an_object_of_the_drivers_world_is_refused_in_a_gang_and_arrives_in_one_of_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    made = MADE_IN_DRIVER[name]()
    assert type(arrived({"inside": [made]})["inside"][0]) is type(made)
    monkeypatch.setenv("WORLD_SIZE", "2")
    data = pickling.dumps({"inside": [made]})
    with pytest.raises(ValueError, match=f"this {name} was made in the driver.* 2 ranks.*Make it inside the function"):
        pickling.loads(data)


def test_a_loader_with_the_drivers_sampler_is_refused_and_one_for_a_rank_is_not() -> None:
    with pytest.raises(ValueError, match="this DistributedSampler was made in the driver"):
        arrived(DataLoader(range(8), sampler=sampler(1, 0)))  # type: ignore[arg-type]
    assert list(arrived(sampler(2, 1))) == [1, 3, 5, 7]


def test_the_drivers_rank_is_the_ranks_own_where_it_arrives() -> None:
    assert arrived({"rank": current_rank()})["rank"] is current_rank()
