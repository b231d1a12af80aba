"""Checks a rank's GPU before the gang uses the GPU: NVML's answers, a small kernel, the user's function.

Runs in the rank, before its process group forms. A GPU that does not pass raises `GpuFaultError`. The driver then
treats the GPU as failed: the gang starts again without the GPU if `min_workers` and the other GPUs allow that.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import psutil

from flytekitplugins.daskpytorch.process.worker import in_thread
from flytekitplugins.daskpytorch.protocol.failure import GpuFaultError
from flytekitplugins.daskpytorch.protocol.function import name_of, unpack_call
from flytekitplugins.daskpytorch.protocol.job import RankOrder
from flytekitplugins.daskpytorch.rank import nvml
from flytekitplugins.daskpytorch.rank.nvml import Gpu, NvmlError

if TYPE_CHECKING:
    import torch

NVML_TIMEOUT = 60.0
"""Timeout, in seconds, for NVML's answers. NVML initialises all GPUs without persistence mode, in seconds for each."""
KERNEL_TIMEOUT = 60.0
"""Timeout, in seconds, for the small kernel, which includes the time to make the CUDA context."""
PAUSE = 1.0
"""Seconds until a second look at a GPU with a fault. Short faults do not count, such as the memory of a process that
is ending."""
MAX_SHARE_OF_OTHERS = 0.5
"""Maximum share of a GPU's memory, from 0 to 1, that processes outside the gangs may hold before the rank begins."""
RANK_NAME = re.compile(r"rank \d+/")
"""Pattern of the name that `main` gives to each rank's process."""
RECOVERIES = {1: "a reset", 2: "a reboot of its host"}
"""Actions that NVML recommends for a GPU, in words. Any other: a reset after all work has left the GPU."""
NUM_NUMBERS = 1 << 18
"""Number of elements that the small kernel computes: 1 MiB, enough for each part of a large GPU to compute some."""
THREAD = "daskpytorch-gpu-check"
"""Name of the threads that call the GPU's driver, in which code that hangs cannot be ended."""


class GpuCheck:
    """Check of one rank's own GPU. Does nothing in a rank without a GPU, or with `Gang(gpu_check="off")`."""

    def __init__(self, order: RankOrder) -> None:
        """Begin to read NVML in a thread. The thread runs beside the imports of the user's modules."""
        self._place, self._function = order.place, order.job.gpu_check
        self._is_on = order.place.gpu is not None and order.job.settings.gpu_check != "off"
        uuid = order.place.gpu_uuid
        self._faults = in_thread(lambda: faults_of(uuid), THREAD) if self._is_on and uuid else None

    def await_nvml(self) -> None:
        """Wait for NVML's answers. Called before the rank initialises CUDA, which a broken GPU may block.

        Raises:
            GpuFaultError: NVML reports a fault, or does not answer.
        """
        if self._faults is None:
            return
        try:
            found = self._faults.result(NVML_TIMEOUT)
        except TimeoutError:
            found = [f"NVML, the driver's library, did not answer within {NVML_TIMEOUT:g} s (nvidia-smi may hang, too)"]
        if found:
            raise _fault("; ".join(found))

    def compute(self, device: torch.device | None) -> None:
        """Run a small kernel with a known result on the GPU, then the user's function.

        Args:
            device: The rank's GPU. None if the gang leaves CUDA uninitialised, and so runs no kernel.

        Raises:
            GpuFaultError: The kernel fails, hangs or has a wrong result, or the user's function raises an exception.
        """
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
            self._call(unpack_call(self._function).function)

    def _call(self, function: Callable[[int], object]) -> None:
        try:
            function(self._place.device_index or 0)
        except Exception as error:  # any exception of the user's function is the fault
            text = " ".join(f"{type(error).__name__}: {error}".split())
            raise GpuFaultError(f"gpu_check={name_of(function)} raised {text}") from error


def _fault(found: str) -> GpuFaultError:
    return GpuFaultError(
        f"the check before its use found: {found}. Reset the GPU (nvidia-smi --gpu-reset) or drain its host. "
        'Gang(gpu_check="off") starts without the check'
    )


# ---- NVML


def faults_of(uuid: str) -> list[str]:
    """Return the faults that NVML reports of a GPU, in words. Empty for a sound GPU, and without NVML."""
    if not _look(uuid):
        return []
    time.sleep(PAUSE)
    return _look(uuid)


def _look(uuid: str) -> list[str]:
    try:
        gpu = nvml.gpu(uuid)
        return [] if gpu is None else list(read_faults(gpu))
    except NvmlError as error:
        return [str(error)]


def read_faults(gpu: Gpu) -> Iterator[str]:
    """Yield a GPU's faults in words.

    Raises:
        NvmlError: The GPU or its driver cannot be used.
    """
    if errors := gpu.ecc_errors():
        yield f"{errors} uncorrectable memory errors (ECC) since its driver was loaded"
    is_remap_pending, has_remap_failed = gpu.remapping()
    if has_remap_failed:
        yield "a row of its memory could not be remapped"
    if is_remap_pending:
        yield "a row of its memory waits to be remapped at a reset"
    if action := gpu.recovery():
        yield f"its driver asks for {RECOVERIES.get(action, 'a reset after all work has left the GPU')}"
    processes = gpu.processes()
    strangers = _strangers(processes)
    _, total = gpu.memory() or (0, 0)
    held = sum(processes[pid] for pid in strangers)
    # The GPU's memory in use proves nothing: a container lists neither the processes of others, nor always its own Dask
    # worker. Ranks of other gangs share the GPU by the user's choice.
    if 0 < MAX_SHARE_OF_OTHERS * total < held:
        named = ", ".join(f"process {pid}" for pid in strangers)
        yield f"other processes hold {held / 2**30:.1f} of {total / 2**30:.1f} GiB of its memory ({named})"


def _strangers(pids: Iterable[int]) -> list[int]:
    """Return the process IDs of neither ranks nor this rank's ancestors, such as a Dask worker.

    A process that does not exist here is left out: NVML may list processes of other containers by process IDs that mean
    nothing here.
    """
    own = {process.pid for process in psutil.Process().parents()}
    found = []
    for pid in sorted(set(pids) - own - {os.getpid()}):
        with contextlib.suppress(psutil.Error):
            if not RANK_NAME.match(psutil.Process(pid).name()):
                found.append(pid)
    return found


# ---- The kernel


def fault_of_kernel(device: torch.device) -> str:
    """Run a small kernel with a known result on a device. Return its fault in words, or "" for the right result."""
    import numpy as np
    import torch

    try:
        computed, numbers = _computed(device), np.arange(NUM_NUMBERS, dtype=np.int32)
        wrong = int((computed.numpy() != (numbers * 3 + 1) ^ numbers).sum())
        if device.type == "cuda":  # the user's function finds no memory of this check
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
    except Exception as error:  # torch raises RuntimeError and subclasses; a broken driver may raise others
        return f"a small kernel failed ({type(error).__name__}: {' '.join(str(error).split())})"
    return f"a small kernel computed {wrong} of {NUM_NUMBERS} numbers wrongly" if wrong else ""


def _computed(device: torch.device) -> torch.Tensor:
    """Return whole numbers that a device has computed, and free their memory on the device.

    Whole numbers are alike on all devices. Matrix products would first load cuBLAS, which takes 0.1 s.
    """
    import torch

    numbers = torch.arange(NUM_NUMBERS, dtype=torch.int32, device=device)
    return ((numbers * 3 + 1) ^ numbers).cpu()
