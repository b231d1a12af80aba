"""A rank's questions about its GPU to NVML, the GPU driver's library, by nvidia-ml-py. Only this file imports `pynvml`.

A container without the driver capability `utility` lacks the library. NVML then knows no GPU. A rank without a GPU does
not ask.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from typing import Any

_logger = logging.getLogger(__name__)


class NvmlError(Exception):
    """NVML reports a GPU or driver that cannot be used."""


def gpu(uuid: str) -> Gpu | None:
    """Return a GPU or MIG instance. None: NVML is not installed here, or does not know the GPU.

    Args:
        uuid: The UUID, with or without the prefix `GPU-`.

    Raises:
        NvmlError: The GPU or its driver cannot be used.
    """
    _begin(os.getpid())
    handle = _ask("nvmlDeviceGetHandleByUUID", uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
    return None if handle is None else Gpu(handle)


def usage(uuid: str) -> tuple[int | None, float | None]:
    """Return a GPU's memory in use, in bytes, and the share of time from 0 to 1 in which the GPU had work lately.

    A value is None if NVML does not know the value.

    Args:
        uuid: The UUID, with or without the prefix `GPU-`.
    """
    with contextlib.suppress(NvmlError):
        if (found := gpu(uuid)) is not None:
            used, _ = found.memory() or (None, None)
            return used, found.utilization()
    return None, None


class Gpu:
    """One GPU or MIG instance. A MIG instance has its own memory and processes, and all else from its GPU."""

    def __init__(self, handle: Any) -> None:
        self._own = handle
        self._whole = _ask("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle) or handle

    def memory(self) -> tuple[int, int] | None:
        """Return the bytes of memory in use, and in all. None: unknown."""
        memory = _ask("nvmlDeviceGetMemoryInfo", self._own)
        return None if memory is None else (memory.used, memory.total)

    def utilization(self) -> float | None:
        """Return the share of time, from 0 to 1, in which the GPU had work lately. None: unknown."""
        rates = _ask("nvmlDeviceGetUtilizationRates", self._own)
        return None if rates is None else rates.gpu / 100

    def processes(self) -> dict[int, int]:
        """Return each process's bytes of GPU memory (0: unknown). Processes outside the container are left out."""
        found = _ask("nvmlDeviceGetComputeRunningProcesses", self._own) or []
        return {process.pid: process.usedGpuMemory or 0 for process in found}

    def ecc_errors(self) -> int:
        """Return the number of uncorrectable memory errors since the driver was loaded or the GPU was reset."""
        import pynvml

        what = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
        return _ask("nvmlDeviceGetTotalEccErrors", self._whole, *what) or 0

    def remapping(self) -> tuple[bool, bool]:
        """Return whether a row of memory waits to be remapped at a reset, and whether one could not be remapped."""
        _, _, is_pending, has_failed = _ask("nvmlDeviceGetRemappedRows", self._whole) or (0, 0, 0, 0)
        return bool(is_pending), bool(has_failed)

    def recovery(self) -> int:
        """Return the action that the driver asks for, one of `NVML_GPU_RECOVERY_ACTION_...`. 0: none, or unknown."""
        import pynvml

        fields = [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
        [asked] = _ask("nvmlDeviceGetFieldValues", self._whole, fields) or [None]
        return asked.value.uiVal if asked is not None and asked.nvmlReturn == pynvml.NVML_SUCCESS else 0


@functools.lru_cache(maxsize=1)
def _begin(pid: int) -> None:  # noqa: ARG001 - a forked child initialises NVML again
    """Initialise NVML once for this process. The initialisation takes long for a sample each two seconds."""
    _ask("nvmlInit")


def _ask(name: str, *arguments: Any) -> Any:
    """Call a function of nvidia-ml-py. Return None if driver, GPU or user may not have what was asked for.

    Raises:
        NvmlError: The GPU or its driver cannot be used.
    """
    import pynvml

    try:
        return getattr(pynvml, name)(*arguments)
    except (pynvml.NVMLError_IrqIssue, pynvml.NVMLError_GpuIsLost, pynvml.NVMLError_ResetRequired) as error:
        raise NvmlError(f"NVML's {name} says: {error}") from error
    except (pynvml.NVMLError_DriverNotLoaded, pynvml.NVMLError_LibRmVersionMismatch) as error:
        _warn(str(error))  # CUDA, which has a library of its own, may work
    except pynvml.NVMLError:
        pass
    return None


@functools.cache
def _warn(text: str) -> None:
    _logger.warning(
        "NVML cannot be used here: %s. This rank's GPU is checked and sampled without NVML. The image may have a "
        "version of the library that the host's driver does not suit",
        text,
    )
