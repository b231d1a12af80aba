"""A GPU with a fault is found before its rank uses the GPU. Libraries in place of NVML and AMD SMI answer."""

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fake_gpus
from fake_gpus import SOUND
from flytekitplugins.daskpytorch import Gang
from flytekitplugins.daskpytorch.driver.request import request_for
from flytekitplugins.daskpytorch.process import gpu_vendor
from flytekitplugins.daskpytorch.protocol.failure import GpuFaultError
from flytekitplugins.daskpytorch.protocol.job import RankOrder
from flytekitplugins.daskpytorch.rank import own_gpu
from flytekitplugins.daskpytorch.rank.own_gpu import GpuCheck
from gangs import order_for

Describe = Callable[..., None]
CPU = torch.device("cpu")


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Describe:
    """Function that writes NVML's answers about GPU-1: those about a sound GPU, with changes. None: no answer."""
    file = fake_gpus.install(tmp_path, monkeypatch, {"GPU-1": SOUND})

    def describe(uuid: str = "GPU-1", others: dict[str, Any] | None = None, **changes: int | None) -> None:
        values = {key: value for key, value in {**SOUND, **changes}.items() if value is not None}
        fake_gpus.describe(file, {uuid: values, **(others or {})})

    return describe


def order_with_gpu(settings: Gang | None = None, uuid: str = "GPU-1", **job: Any) -> RankOrder:
    """The order of a rank that has GPU 3 of its host for itself."""
    order = order_for(settings, **job)
    return replace(order, place=replace(order.place, gpu="3", visible_gpus=("3",), gpu_uuid=uuid))


# ---- NVML's answers


@pytest.mark.parametrize(
    ("answers", "fault"),
    [
        ({}, None),
        ({"ecc": 2}, "2 uncorrectable memory errors (ECC) since its driver was loaded"),
        ({"remap_pending": 1}, "a row of its memory waits to be remapped at a reset"),
        ({"remap_failed": 1}, "a row of its memory could not be remapped"),
        ({"recovery": 1}, "its driver asks for a reset"),
        ({"recovery": 2}, "its driver asks for a reboot of its host"),
        ({"recovery": 4}, "its driver asks for a reset after all work has left the GPU"),
        ({"code": 15}, "NVML's nvmlDeviceGetHandleByUUID says: GPU is lost"),
        ({"code": 16}, "NVML's nvmlDeviceGetHandleByUUID says: GPU requires restart"),
        ({"code": 4}, None),  # no permission
        ({"others": {"*": {"code": 11}}}, "NVML's nvmlInit says: Interrupt Request Issue"),
        (dict.fromkeys(["ecc", "remap_pending", "recovery", "used"]), None),
    ],
)
def test_each_answer_of_nvml_is_read(driver: Describe, answers: dict[str, Any], fault: str | None) -> None:
    driver(**answers)
    assert gpu_vendor.faults_of("1") == ([] if fault is None else [fault])


def test_all_faults_of_a_gpu_are_named(driver: Describe) -> None:
    driver(ecc=1, recovery=1)
    check = GpuCheck(order_with_gpu())
    with pytest.raises(GpuFaultError, match=r"found: 1 uncorrectable .*; its driver asks for a reset\. Reset the GPU"):
        check.await_driver()


@pytest.mark.parametrize("code", [9, 18])  # driver not loaded, version mismatch
def test_a_library_that_does_not_suit_the_driver_is_no_fault(driver: Describe, code: int) -> None:
    driver(ecc=3, others={"*": {"code": code}})
    assert gpu_vendor.faults_of("GPU-1") == []
    assert gpu_vendor.usage("GPU-1") == (None, None)


def test_a_mig_instance_has_its_own_memory_and_the_faults_of_its_gpu(driver: Describe) -> None:
    instance = {"whole": 1, "used": 1 << 30, "total": 10 << 30}
    driver(ecc=3, used=70 << 30, others={"MIG-a": instance})
    assert gpu_vendor.usage("MIG-a")[0] == 1 << 30
    assert gpu_vendor.faults_of("MIG-a") == ["3 uncorrectable memory errors (ECC) since its driver was loaded"]
    assert gpu_vendor.faults_of("GPU-2") == []  # NVML does not know it


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the driver")
def test_without_the_driver_nothing_is_known_and_nothing_said(capfd: pytest.CaptureFixture[str]) -> None:
    """By the library itself."""
    gpu_vendor._begin_nvml.cache_clear()
    assert gpu_vendor.faults_of("GPU-1") == []
    assert gpu_vendor.usage("GPU-1") == (None, None)
    assert "".join(capfd.readouterr()) == ""


def test_the_functions_in_place_of_nvidia_ml_pys_take_as_many_arguments() -> None:
    for name, function in vars(fake_gpus.fake_library()).items():
        if name.startswith("nvml"):
            assert len(signature(function).parameters) == len(signature(getattr(pynvml, name)).parameters), name


# ---- AMD SMI's answers


ADDRESS = "0000:43:00.0"


def handle(address: str) -> str:
    if address != ADDRESS:
        raise RuntimeError("AMDSMI_STATUS_NOT_FOUND")
    return address


@pytest.mark.parametrize(
    ("name", "answer", "faults", "usage"),
    [
        ("vram_usage", {"vram_used": 3, "vram_total": 9}, [], (3 << 20, None)),
        ("activity", {"gfx_activity": 50, "umc_activity": "N/A"}, [], (None, 0.5)),
        ("activity", {"gfx_activity": "N/A"}, [], (None, None)),
        ("total_ecc_count", {"uncorrectable_count": 2}, ["2 uncorrectable memory errors"], (None, None)),
        ("bad_page_info", [{"status": 0}], [], (None, None)),
        ("bad_page_info", [{"status": 1}], ["a bad page of its memory waits"], (None, None)),
        ("bad_page_info", [{"status": 2}], ["a bad page of its memory cannot"], (None, None)),
    ],
)
def test_amds_library_is_asked_about_a_gpu_with_a_pci_address(
    name: str, answer: Any, faults: list[str], usage: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = SimpleNamespace(amdsmi_init=bool, amdsmi_get_processor_handle_from_bdf=handle)
    setattr(library, f"amdsmi_get_gpu_{name}", lambda _: answer)
    monkeypatch.setitem(sys.modules, "amdsmi", library)
    found = gpu_vendor.faults_of(ADDRESS)
    assert [fault[: len(said)] for fault, said in zip(found, faults, strict=True)] == faults
    assert gpu_vendor.usage(ADDRESS) == usage
    assert gpu_vendor.faults_of("0000:44:00.0") == []
    if faults:
        with pytest.raises(GpuFaultError, match=r"Reset the GPU \(amd-smi reset --gpureset\)"):
            GpuCheck(order_with_gpu(uuid=ADDRESS)).await_driver()
    monkeypatch.setitem(sys.modules, "amdsmi", None)  # as if it were not installed
    assert (gpu_vendor.faults_of(ADDRESS), gpu_vendor.usage(ADDRESS)) == ([], (None, None))


# ---- The kernel, and the user's function


class Wrong(TorchDispatchMode):
    """Torch on a device that computes one number wrongly, at its first exclusive or."""

    has_erred = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "bitwise_xor" in str(func) and not self.has_erred:
            self.has_erred = True
            result[12_345] += 1
        return result


def test_the_kernel_has_a_known_result() -> None:
    assert own_gpu.fault_of_kernel(CPU) == ""
    with Wrong():
        assert own_gpu.fault_of_kernel(CPU) == "a small kernel computed 1 of 262144 numbers wrongly"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel would not fail")
def test_a_kernel_that_fails_is_the_gpus_fault() -> None:
    assert own_gpu.fault_of_kernel(torch.device("cuda")).startswith("a small kernel failed (")


@pytest.mark.timeout(60)
def test_a_kernel_that_hangs_is_not_waited_for(driver: Describe, monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()
    monkeypatch.setattr(own_gpu, "fault_of_kernel", lambda _: is_over.wait())
    monkeypatch.setattr(own_gpu, "KERNEL_TIMEOUT", 0.1)
    with pytest.raises(GpuFaultError, match=r"a small kernel did not end within 0\.1 s"):
        GpuCheck(order_with_gpu()).compute(CPU)
    is_over.set()


def test_a_function_that_cannot_be_pickled_is_refused_before_any_worker_comes() -> None:
    lock = threading.Lock()

    def check(index: int) -> None:
        lock.acquire()

    with pytest.raises(TypeError, match=r"pickle.*lock"):
        request_for(print, (), {}, Gang(gpu_check=check))


def test_nothing_is_checked_without_a_gpu_or_if_the_check_is_off(
    driver: Describe, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(ecc=3)
    monkeypatch.setattr(own_gpu, "fault_of_kernel", lambda _: "broken")
    for order in (order_for(), order_with_gpu(Gang(gpu_check="off"))):
        check = GpuCheck(order)
        check.await_driver()
        check.compute(CPU)
    with pytest.raises(GpuFaultError, match="broken"):
        GpuCheck(order_with_gpu()).compute(CPU)
