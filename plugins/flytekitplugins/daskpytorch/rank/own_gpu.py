"""This rank's GPU: what its vendor's library says of it, and the check before the gang uses it.

Runs in the rank. Only this file imports `pynvml` and `amdsmi`. A GPU is known by NVIDIA's UUID, or by AMD's PCI
address. A container without the driver capability `utility` lacks NVML's library: NVML then knows no GPU.

The check runs before the process group forms: the library's answers, a small kernel, the user's function. A GPU that
does not pass raises `GpuFaultError`, and counts as a lost worker.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from flytekitplugins.daskpytorch.process.worker import in_thread
from flytekitplugins.daskpytorch.protocol.failure import GpuFaultError
from flytekitplugins.daskpytorch.protocol.function import name_of, unpack_call
from flytekitplugins.daskpytorch.protocol.job import RankOrder

if TYPE_CHECKING:
    import torch


# ---- What NVML or AMD SMI says

ECC_ERRORS = "uncorrectable memory errors (ECC) since its driver was loaded"
RECOVERIES = {1: "a reset", 2: "a reboot of its host"}


class NvmlError(Exception):
    """NVML reports a GPU or driver that cannot be used."""


def usage(uuid: str) -> tuple[int | None, float | None]:
    """Return bytes in use, and the share of time (0 to 1) with work lately. None: unknown.

    A MIG instance has memory of its own, and all else of its GPU.
    """
    if _is_amd(uuid):
        return _usage_of_amd(uuid)
    with contextlib.suppress(NvmlError):
        if (gpu := _find(uuid)) is not None:
            memory, rates = _ask("nvmlDeviceGetMemoryInfo", gpu), _ask("nvmlDeviceGetUtilizationRates", gpu)
            return None if memory is None else memory.used, None if rates is None else rates.gpu / 100
    return None, None


def faults_of(uuid: str) -> list[str]:
    if _is_amd(uuid):
        errors = _asked_of_amd(uuid, "amdsmi_get_gpu_total_ecc_count", "uncorrectable_count")
        return [f"{errors} {ECC_ERRORS}"] if errors else []
    try:
        gpu = _find(uuid)
        return [] if gpu is None else list(_read_faults(gpu))
    except NvmlError as error:
        return [str(error)]


def _find(uuid: str) -> Any:
    _begin(os.getpid())
    return _ask("nvmlDeviceGetHandleByUUID", uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")


def _read_faults(gpu: Any) -> Iterator[str]:
    import pynvml

    whole = _ask("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", gpu) or gpu
    what = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    if errors := _ask("nvmlDeviceGetTotalEccErrors", whole, *what):
        yield f"{errors} {ECC_ERRORS}"
    _, _, is_pending, has_failed = _ask("nvmlDeviceGetRemappedRows", whole) or (0, 0, 0, 0)
    if has_failed:
        yield "a row of its memory could not be remapped"
    if is_pending:
        yield "a row of its memory waits to be remapped at a reset"
    [asked] = _ask("nvmlDeviceGetFieldValues", whole, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]) or [None]
    if asked is not None and asked.nvmlReturn == pynvml.NVML_SUCCESS and (action := asked.value.uiVal):
        yield f"its driver asks for {RECOVERIES.get(action, 'a reset after all work has left the GPU')}"


@functools.lru_cache(maxsize=1)
def _begin(pid: int) -> None:  # noqa: ARG001 - a forked child initialises NVML again
    _ask("nvmlInit")


def _ask(name: str, *arguments: Any) -> Any:
    import pynvml

    try:
        return getattr(pynvml, name)(*arguments)
    except (pynvml.NVMLError_IrqIssue, pynvml.NVMLError_GpuIsLost, pynvml.NVMLError_ResetRequired) as error:
        raise NvmlError(f"NVML's {name} says: {error}") from error
    except pynvml.NVMLError:  # CUDA, which has a library of its own, may work
        return None


def _is_amd(uuid: str) -> bool:
    return ":" in uuid


def _usage_of_amd(address: str) -> tuple[int | None, float | None]:
    used = _asked_of_amd(address, "amdsmi_get_gpu_vram_usage", "vram_used")  # MB
    busy = _asked_of_amd(address, "amdsmi_get_gpu_activity", "gfx_activity")  # %
    return None if used is None else used << 20, None if busy is None else busy / 100


def _asked_of_amd(address: str, question: str, key: str) -> int | None:
    try:
        import amdsmi

        amdsmi.amdsmi_init()
        answer = getattr(amdsmi, question)(amdsmi.amdsmi_get_processor_handle_from_bdf(address))[key]
    except Exception:  # not installed, its library missing, `AmdSmiException`: HIP, with its own library, may work
        return None
    return answer if isinstance(answer, int) else None  # "N/A"


# ---- The check

NVML_TIMEOUT = 60.0
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
        self._faults = in_thread(lambda: faults_of(uuid), THREAD) if self._is_on and uuid else None

    def await_nvml(self) -> None:
        """Wait for NVML, before the rank initialises CUDA, which a broken GPU may block. Raises `GpuFaultError`."""
        if self._faults is None:
            return
        try:
            found = self._faults.result(NVML_TIMEOUT)
        except TimeoutError:
            found = [f"the driver's library did not answer within {NVML_TIMEOUT:g} s (nvidia-smi may hang, too)"]
        if found:
            raise _fault("; ".join(found))

    def compute(self, device: torch.device | None) -> None:
        if not self._is_on:
            return
        if device is not None:
            try:
                found = in_thread(lambda: fault_of_kernel(device), THREAD).result(KERNEL_TIMEOUT)
            except TimeoutError:
                found = f"a small kernel did not end within {KERNEL_TIMEOUT:g} s"
            if found:
                raise _fault(found)
        if self._function is not None:
            self._call(unpack_call(self._function).func)

    def _call(self, function: Callable[[int], object]) -> None:
        try:
            function(self._place.device_index or 0)
        except Exception as error:  # any exception of the user's function is the fault
            text = " ".join(f"{type(error).__name__}: {error}".split())
            raise GpuFaultError(f"gpu_check={name_of(function)} raised {text}") from error


def _fault(found: str) -> GpuFaultError:
    return GpuFaultError(
        f"the check before its use found: {found}. Reset the GPU (nvidia-smi --gpu-reset, "
        "amd-smi reset --gpureset) or drain its host. "
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
