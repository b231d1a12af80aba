"""Checks this rank's GPU before the process group forms: the driver's answers, a small kernel, the user's function.

Runs in the rank. A GPU that does not pass raises `GpuFaultError`, and counts as a lost worker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from flytekitplugins.daskpytorch.process import gpu_vendor
from flytekitplugins.daskpytorch.process.worker import in_thread
from flytekitplugins.daskpytorch.protocol.failure import GpuFaultError
from flytekitplugins.daskpytorch.protocol.function import name_of, unpack_call
from flytekitplugins.daskpytorch.protocol.job import RankOrder

if TYPE_CHECKING:
    import torch


# ---- The check

DRIVER_TIMEOUT = 60.0
"""Seconds. Without persistence mode, NVML takes some for each GPU of the host."""
KERNEL_TIMEOUT = 60.0
NUM_NUMBERS = 1 << 18
"""1 MiB, enough for each part of a large GPU to compute some."""
THREAD = "daskpytorch-gpu-check"
"""Threads that call the GPU's driver, whose code cannot be ended if it hangs."""


class GpuCheck:
    def __init__(self, order: RankOrder) -> None:
        """In a thread, beside the imports of the user's modules."""
        self._place, self._function = order.place, order.job.gpu_check
        self._is_on = order.place.gpu is not None and order.job.settings.gpu_check != "off"
        uuid = order.place.gpu_uuid
        self._vendor = gpu_vendor.vendor_of(uuid)
        self._faults = in_thread(lambda: gpu_vendor.faults_of(uuid), THREAD) if self._is_on and uuid else None

    def await_driver(self) -> None:
        """Wait for the driver, before CUDA is initialised, which a broken GPU may block. Raises `GpuFaultError`."""
        if self._faults is None:
            return
        try:
            found = self._faults.result(DRIVER_TIMEOUT)
        except TimeoutError:
            asked = f"{self._vendor.title}, the driver's library, did not answer within {DRIVER_TIMEOUT:g} s"
            found = [f"{asked} ({self._vendor.tool} may hang, too)"]
        if found:
            raise self._fault("; ".join(found))

    def compute(self, device: torch.device | None) -> None:
        if not self._is_on:
            return
        if device is not None:
            try:
                found = in_thread(lambda: fault_of_kernel(device), THREAD).result(KERNEL_TIMEOUT)
            except TimeoutError:
                found = f"a small kernel did not end within {KERNEL_TIMEOUT:g} s"
            if found:
                raise self._fault(found)
        if self._function is not None:
            self._call(unpack_call(self._function).func)

    def _call(self, function: Callable[[int], object]) -> None:
        try:
            function(self._place.device_index or 0)
        except Exception as error:  # any exception of the user's function is the fault
            text = " ".join(f"{type(error).__name__}: {error}".split())
            raise GpuFaultError(f"gpu_check={name_of(function)} raised {text}") from error

    def _fault(self, found: str) -> GpuFaultError:
        return GpuFaultError(
            f"the check before its use found: {found}. Reset the GPU ({self._vendor.reset}) or drain its host. "
            'Gang(gpu_check="off") starts without the check'
        )


# ---- The kernel


def fault_of_kernel(device: torch.device) -> str:
    import torch

    try:
        wrong = int((_computed(device) != _computed(torch.device("cpu"))).sum())
        if device.type == "cuda":  # the user's function finds no memory of this check
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
    except Exception as error:  # torch raises RuntimeError and subclasses; a broken driver may raise others
        return f"a small kernel failed ({type(error).__name__}: {' '.join(str(error).split())})"
    return f"a small kernel computed {wrong} of {NUM_NUMBERS} numbers wrongly" if wrong else ""


def _computed(device: torch.device) -> torch.Tensor:
    """Whole numbers are alike on all devices. Matrix products would first load cuBLAS, which takes 0.1 s."""
    import torch

    numbers = torch.arange(NUM_NUMBERS, dtype=torch.int32, device=device)
    return ((numbers * 3 + 1) ^ numbers).cpu()
