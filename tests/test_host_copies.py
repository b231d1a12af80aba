"""Host copies of device tensors have the tensors' values, in locked memory where possible. Devices are simulated."""

from __future__ import annotations

import io
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch

from flytekitplugins.daskpytorch.rank.shard_plan import PAGE, HostCopies

ATEN = torch.ops.aten


class Devices:
    """Stands in for `torch.cuda`, of devices that copy only when somebody waits for them."""

    def __init__(self, *, can_lock: bool) -> None:
        self.can_lock = can_lock
        self.pending: dict[torch.device, list[Callable[[], object]]] = {}
        self.locked: dict[int, int] = {}
        """Addresses -> sizes in bytes."""
        self.num_cleared = 0

    def synchronize(self, device: torch.device | None = None) -> None:
        for copy in self.pending.pop(device or torch.device("cuda:0"), []):
            copy()

    def lock(self, address: int, size: int, flags: int) -> int:
        assert flags == 0
        if self.can_lock:
            self.locked[address] = size
        return 0 if self.can_lock else 2


class OnDevice(torch.Tensor):
    """A tensor that says that it is on a device."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: torch.Tensor, device: str, devices: Devices) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, values.shape, dtype=values.dtype, device=device, strides=values.stride()
        )
        return made

    def __init__(self, values: torch.Tensor, device: str, devices: Devices) -> None:
        self.values_there, self.devices = values, devices

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ATEN.copy_.default:
            to, original = args[:2]
            copy = lambda: to.copy_(original.values_there)  # noqa: E731
            original.devices.pending.setdefault(original.device, []).append(copy)
            return to
        if func is ATEN.empty_like.default:
            return torch.empty_like(args[0].values_there, **kwargs)
        raise NotImplementedError(func)


@pytest.fixture
def devices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Devices:
    devices = Devices(can_lock=getattr(request, "param", True))
    ones = torch.ones

    def start_kernel(*shape: Any, device: Any = None) -> torch.Tensor:
        devices.num_cleared += device is not None
        return ones(*shape)

    runtime = SimpleNamespace(cudaHostRegister=devices.lock, cudaHostUnregister=devices.locked.pop)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", devices.synchronize)
    monkeypatch.setattr(torch, "ones", start_kernel)
    return devices


def values() -> list[torch.Tensor]:
    """The same in each call."""
    torch.manual_seed(0)
    return [
        torch.arange(12.0).reshape(3, 4),
        torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.tensor(7, dtype=torch.int64),
        torch.zeros(0, 3),
        torch.rand(1000).to(torch.bfloat16),
        torch.tensor([True, False, True]),
    ]


def on_devices(devices: Devices) -> list[torch.Tensor]:
    return [OnDevice(tensor, f"cuda:{index % 2}", devices) for index, tensor in enumerate(values())]


def test_every_device_that_a_copy_comes_from_is_waited_for(devices: Devices) -> None:
    originals = on_devices(devices)
    copies = HostCopies(originals)
    copies.fill(originals)
    assert not devices.pending
    for copy, wanted in zip(copies.tensors, values(), strict=True):
        assert copy.equal(wanted)
        assert copy.stride() == wanted.stride()


def test_just_as_much_memory_is_locked_as_the_copies_need_and_unlocked_with_them(devices: Devices) -> None:
    size = 3 << 20  # which torch's own allocator would make four of
    copies = HostCopies([OnDevice(torch.zeros(size, dtype=torch.uint8), "cuda:1", devices)])
    [(address, locked)] = devices.locked.items()
    assert (address % PAGE, locked) == (0, size)
    assert copies.tensors[0].data_ptr() == address
    [tensor] = copies.tensors
    del copies
    assert devices.locked  # the tensor is in there
    del tensor
    assert not devices.locked


def test_a_copy_is_saved_without_its_neighbours(devices: Devices) -> None:
    copies = HostCopies(on_devices(devices))
    file = io.BytesIO()
    torch.save(copies.tensors[0], file)
    assert len(file.getvalue()) < 2000


@pytest.mark.parametrize("devices", [False], indirect=True)
def test_where_memory_cannot_be_locked_copies_are_made_all_the_same(
    devices: Devices, capsys: pytest.CaptureFixture[str]
) -> None:
    originals = on_devices(devices)
    copies = HostCopies(originals)
    copies.fill(originals)
    assert all(copy.equal(wanted) for copy, wanted in zip(copies.tensors, values(), strict=True))
    assert devices.num_cleared == 1  # the failed call is not reported by the user's next kernel
    assert "could not be page-locked" in capsys.readouterr().err
