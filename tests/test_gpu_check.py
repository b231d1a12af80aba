"""A GPU with a fault is found before its rank uses the GPU. The faults come from a library in place of NVML."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fake_gpus
from fake_gpus import SOUND
from flytekitplugins.daskpytorch import Gang
from flytekitplugins.daskpytorch.driver.request import request_for
from flytekitplugins.daskpytorch.protocol.code import pack_call
from flytekitplugins.daskpytorch.protocol.gpu_faults import GpuFaultError
from flytekitplugins.daskpytorch.protocol.orders import RankOrder
from flytekitplugins.daskpytorch.rank import gpu_check, nvml
from flytekitplugins.daskpytorch.rank.gpu_check import GpuCheck
from gangs import order_for

Describe = Callable[..., None]
CPU = torch.device("cpu")
ABSENT = (1 << 31) - 1
"""Process ID that no process has."""
NAMED = "import sys; open('/proc/self/comm', 'w').write(sys.argv[1]); print(flush=True); sys.stdin.read()"
"""Program with the name that its argument gives, up to the end of its input."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_gpus.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def driver(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Describe:
    """Function that writes NVML's answers about GPU-1: those about a sound GPU, with changes. None: no answer."""
    file = tmp_path / "gpus"
    own = shutil.copy(library, tmp_path)  # a process initialises each library once
    monkeypatch.setattr(nvml, "LIBRARY", str(own))
    monkeypatch.setattr(gpu_check, "PAUSE", 0.0)
    monkeypatch.setenv("FAKE_NVML", str(file))

    def describe(uuid: str = "GPU-1", others: dict[str, Any] | None = None, **changes: int | None) -> None:
        values = {key: value for key, value in {**SOUND, **changes}.items() if value is not None}
        fake_gpus.describe(file, {uuid: values, **(others or {})})

    describe()
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
        ({"retiring": 1}, "a page of its memory waits to be retired at a reset"),
        ({"recovery": 1}, "its driver asks for a reset"),
        ({"recovery": 2}, "its driver asks for a reboot of its host"),
        ({"recovery": 4}, "its driver asks for a reset after all work has left the GPU"),
        ({"fabric": 0, "fabric_status": 999}, None),  # no NVLink fabric
        ({"fabric_status": 999}, "it could not join its NVLink fabric (code 999)"),
        ({"slowdowns": 0x4}, None),  # a limit of power, as under load
        ({"slowdowns": 0x8 | 0x40}, "its clocks are slowed down by hardware and heat before any work"),
        ({"slowdowns": 0x80}, "its clocks are slowed down by its power supply before any work"),
        ({"used": 30 << 30, "pid": 812}, None),
        ({"used": 60 << 30}, None),  # by processes of other containers, or by the own Dask worker
        ({"used": 60 << 30, "pid": ABSENT, "pid_memory": 60 << 30}, None),
        ({"used": 60 << 30, "pid": os.getppid(), "pid_memory": 60 << 30}, None),  # as a Dask worker's
        ({"code": 15}, "NVML's nvmlDeviceGetHandleByUUID says: GPU is lost (code 15)"),
        ({"code": 16}, "NVML's nvmlDeviceGetHandleByUUID says: GPU requires a reset (code 16)"),
        ({"code": 4}, None),  # no permission
        ({"ecc": 2, "address_code": 15}, "NVML's nvmlDeviceGetPciInfo_v3 says: GPU is lost (code 15)"),
        (dict.fromkeys(["ecc", "remap_pending", "retiring", "recovery", "fabric", "slowdowns", "used", "bus"]), None),
    ],
)
def test_each_answer_of_nvml_is_read(driver: Describe, answers: dict[str, int | None], fault: str | None) -> None:
    driver(**answers)
    assert gpu_check.faults_of("1") == ([] if fault is None else [fault])


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("name", "size", "is_fault"), [("simulate", 60, True), ("simulate", 30, False), ("rank 3/8", 60, False)]
)
def test_only_processes_outside_the_gangs_may_not_hold_the_memory(
    driver: Describe, name: str, size: int, is_fault: bool
) -> None:
    with subprocess.Popen([sys.executable, "-c", NAMED, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        driver(used=70 << 30, pid=other.pid, pid_memory=size << 30, slowdowns=0x8)  # slowed down by the process's work
        text = f"other processes hold {size}.0 of 80.0 GiB of its memory (process {other.pid})"
        assert gpu_check.faults_of("1") == ([text] if is_fault else [])
        driver(used=70 << 30, pid=other.pid)  # of unknown size
        assert gpu_check.faults_of("1") == []
        assert other.stdin is not None
        other.stdin.close()


def test_all_faults_of_a_gpu_are_named(driver: Describe) -> None:
    driver(ecc=1, recovery=1)
    check = GpuCheck(order_with_gpu())
    with pytest.raises(GpuFaultError, match=r"found: 1 uncorrectable .*; its driver asks for a reset\. Reset the GPU"):
        check.await_nvml()


def test_a_driver_that_does_not_work_is_the_gpus_fault(driver: Describe) -> None:
    driver(others={"*": {"code": 11}})
    assert gpu_check.faults_of("GPU-1") == ["NVML's nvmlInit_v2 says: the driver finds an interrupt problem (code 11)"]


@pytest.mark.parametrize(("code", "cause"), [(9, "the driver is not loaded"), (18, "driver/library version mismatch")])
def test_a_library_that_does_not_suit_the_driver_is_no_fault(
    driver: Describe, caplog: pytest.LogCaptureFixture, code: int, cause: str
) -> None:
    driver(ecc=3, others={"*": {"code": code}})
    assert gpu_check.faults_of("GPU-1") == []
    assert nvml.usage("GPU-1") == (None, None)
    [record] = caplog.records
    assert f"cannot be used here: {cause} (code {code})" in record.getMessage()


def test_usage_initialises_nvml_once_for_each_process(driver: Describe, monkeypatch: pytest.MonkeyPatch) -> None:
    count = ctypes.c_int.in_dll(ctypes.CDLL(nvml.LIBRARY), "num_inits")
    driver(busy=25, used=50)
    before = count.value
    assert {nvml.usage("GPU-1") for _ in range(3)} == {(50, 0.25)}
    assert count.value == before + 1
    monkeypatch.setattr(os, "getpid", lambda: ABSENT)  # as in a forked child
    assert nvml.usage("GPU-1") == (50, 0.25)
    assert count.value == before + 2


def test_a_mig_instance_has_its_own_memory_and_the_faults_of_its_gpu(driver: Describe) -> None:
    instance = {"is": 1, "whole": 1, "used": 1 << 30, "total": 10 << 30}
    driver(ecc=3, used=70 << 30, others={"MIG-a": instance})
    gpu = nvml.gpu("MIG-a")
    assert gpu is not None
    assert (gpu.memory(), gpu.ecc_errors()) == ((1 << 30, 10 << 30), 3)


def test_a_gpu_or_driver_that_nvml_does_not_know_passes(driver: Describe, monkeypatch: pytest.MonkeyPatch) -> None:
    assert nvml.gpu("GPU-2") is None
    assert gpu_check.faults_of("GPU-2") == []
    monkeypatch.setattr(nvml, "LIBRARY", "libnvidia-ml.so.none")
    driver(ecc=3)
    assert gpu_check.faults_of("GPU-1") == []


def test_a_fault_that_has_passed_at_the_second_look_does_not_count(
    driver: Describe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as clocks that heat slows down."""
    driver(slowdowns=0x40)
    monkeypatch.setattr(time, "sleep", lambda _: driver())
    assert gpu_check.faults_of("GPU-1") == []


@pytest.mark.timeout(60)
def test_nvml_that_hangs_is_not_waited_for(driver: Describe, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(hangs=1)
    monkeypatch.setattr(gpu_check, "NVML_TIMEOUT", 0.1)
    check = GpuCheck(order_with_gpu())
    with pytest.raises(GpuFaultError, match=r"NVML, the driver's library, did not answer within 0\.1 s"):
        check.await_nvml()
    driver()  # lets the abandoned thread end
    for thread in threading.enumerate():
        if thread.name == "daskpytorch-gpu-check":
            thread.join(30.0)
            assert not thread.is_alive()


def test_the_kernels_log_is_quoted_beside_a_fault(
    driver: Describe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "kmsg"
    log.write_text(
        "4,901,5140900,-;NVRM: Xid (PCI:0000:3b:00): 48, pid=812, name=python, An uncorrectable double bit error\n"
        "4,902,5140901,-;NVRM: Xid (PCI:0000:af:00): 79, GPU has fallen off the bus.\n"
        "4,903,5140902,-;NVRM: Xid (PCI:0000:3B:00): 63, Row Remapper\n"
    )
    assert gpu_check.xids_of("0000:3b:00", str(log)) == ["48", "63"]
    assert gpu_check.xids_of("0000:3b:00", str(tmp_path / "none")) == []
    monkeypatch.setattr(gpu_check, "KERNEL_LOG", str(log))
    driver(ecc=1)
    assert gpu_check.faults_of("GPU-1")[1:] == ["the kernel's log has Xid 48, 63 of this GPU"]
    driver()
    assert gpu_check.faults_of("GPU-1") == []  # a reset may have mended the GPU since


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
    assert gpu_check.fault_of_kernel(CPU) == ""
    with Wrong():
        assert gpu_check.fault_of_kernel(CPU) == "a small kernel computed 1 of 262144 numbers wrongly"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel would not fail")
def test_a_kernel_that_fails_is_the_gpus_fault() -> None:
    assert gpu_check.fault_of_kernel(torch.device("cuda")).startswith("a small kernel failed (")


@pytest.mark.timeout(60)
def test_a_kernel_that_hangs_is_not_waited_for(driver: Describe, monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()
    monkeypatch.setattr(gpu_check, "fault_of_kernel", lambda _: is_over.wait())
    monkeypatch.setattr(gpu_check, "KERNEL_TIMEOUT", 0.1)
    with pytest.raises(GpuFaultError, match=r"a small kernel did not end within 0\.1 s"):
        GpuCheck(order_with_gpu()).compute(CPU)
    is_over.set()


def refuse(index: int) -> None:
    """The user's function."""
    raise ArithmeticError(f"device {index} is\nslow")


def test_the_users_function_gets_the_gpus_index_and_its_exception_is_the_fault(driver: Describe) -> None:
    job = {"gpu_check": pack_call(refuse, (), {})}
    with pytest.raises(GpuFaultError, match=r"^gpu_check=refuse raised ArithmeticError: device 0 is slow$") as error:
        GpuCheck(order_with_gpu(**job)).compute(None)
    assert isinstance(error.value.__cause__, ArithmeticError)
    GpuCheck(order_for(**job)).compute(None)  # without a GPU


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
    monkeypatch.setattr(gpu_check, "fault_of_kernel", lambda _: "broken")
    for order in (order_for(), order_with_gpu(Gang(gpu_check="off"))):
        check = GpuCheck(order)
        check.await_nvml()
        check.compute(CPU)
    with pytest.raises(GpuFaultError, match="broken"):
        GpuCheck(order_with_gpu()).compute(CPU)
