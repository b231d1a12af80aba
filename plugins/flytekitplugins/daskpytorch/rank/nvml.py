"""NVML's answers about one GPU, from the GPU driver's own library. Runs in a rank. Only this file calls NVML.

The library comes with the driver, and its functions keep their arguments over the versions. A container without the
driver capability `utility` lacks the library.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
from ctypes import byref, c_char, c_char_p, c_int, c_longlong, c_ubyte, c_uint, c_ulonglong, c_void_p
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
SUCCESS = 0
BROKEN = {
    11: "the driver finds an interrupt problem",
    15: "GPU is lost",
    16: "GPU requires a reset",
}
"""Return codes of NVML by which a GPU or its driver cannot be used. With other codes a value is unknown."""
NO_DRIVER = {9: "the driver is not loaded", 18: "driver/library version mismatch"}
"""Return codes of NVML by which the library cannot talk to the driver. CUDA, which has a library of its own, may work:
an image may have an old NVML."""
UNCORRECTED, SINCE_LOAD = 1, 0
"""Arguments of NVML: uncorrectable memory errors, and counters since the driver was loaded."""
RECOVERY_FIELD = 230
"""Number of NVML's field for the action that a GPU needs, which drivers from 550 on have."""
SLOWDOWNS = {0x08: "hardware", 0x40: "heat", 0x80: "its power supply"}
"""Bits of NVML's clock limits that slow a GPU down by half or more, with the cause."""
FABRIC_COMPLETE = 3
"""State of a GPU that has ended its attempt to join its NVLink fabric."""
MAX_PROCESSES = 64
UNKNOWN_SIZE = (1 << 64) - 1
"""Memory of a process whose size NVML does not know."""

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
    with contextlib.suppress(OSError, LookupError):
        return Gpu(_loaded(LIBRARY, os.getpid()), uuid)
    return None


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


@functools.lru_cache(maxsize=1)
def _loaded(library: str, pid: int) -> ctypes.CDLL:  # noqa: ARG001 - a forked child needs its own
    """Load and initialise NVML once for this process. The initialisation takes long for a sample each two seconds.

    Raises:
        OSError: NVML is not installed here, or may not be used.
        NvmlError: The driver cannot be used.
    """
    loaded = ctypes.CDLL(library)
    if not _call(loaded, "nvmlInit_v2"):
        raise OSError("NVML could not be initialised")
    return loaded


def _call(library: ctypes.CDLL, name: str, *arguments: Any) -> bool:
    """Call a function of NVML. Return False if the driver, GPU or user may not have what was asked for.

    Raises:
        NvmlError: The GPU or its driver cannot be used.
    """
    function = getattr(library, name, None)
    if function is None:  # an older driver
        return False
    code = function(*arguments)
    if code in BROKEN:
        raise NvmlError(f"NVML's {name} says: {BROKEN[code]} (code {code})")
    if code in NO_DRIVER:
        _warn(code)
    return bool(code == SUCCESS)


@functools.cache
def _warn(code: int) -> None:
    _logger.warning(
        "NVML (%s) cannot be used here: %s (code %d). This rank's GPU is checked and sampled without NVML. The image "
        "may have a version of the library that the host's driver does not suit",
        LIBRARY,
        NO_DRIVER[code],
        code,
    )


class _PciInfo(ctypes.Structure):
    _fields_ = (
        ("legacy_id", c_char * 16),
        ("domain", c_uint),
        ("bus", c_uint),
        ("device", c_uint),
        ("device_id", c_uint),
        ("subsystem_id", c_uint),
        ("id", c_char * 32),
    )


class _Rates(ctypes.Structure):
    _fields_ = (("gpu", c_uint), ("memory", c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong))


class _Process(ctypes.Structure):
    _fields_ = (("pid", c_uint), ("memory", c_ulonglong), ("instance", c_uint), ("compute_instance", c_uint))


class _Fabric(ctypes.Structure):
    _fields_ = (("cluster", c_ubyte * 16), ("status", c_int), ("clique", c_uint), ("state", c_ubyte))


class _FieldValue(ctypes.Structure):
    _fields_ = (
        ("field", c_uint),
        ("scope", c_uint),
        ("time", c_longlong),
        ("latency", c_longlong),
        ("type", c_uint),
        ("code", c_uint),
        ("value", c_uint),  # the first member of a union of 8 bytes
        ("rest", c_uint),
    )


class Gpu:
    """One GPU or MIG instance. A value is None if the GPU or its driver does not have the value.

    A MIG instance has its own memory and processes, and all else from its GPU.
    """

    def __init__(self, library: ctypes.CDLL, uuid: str) -> None:
        """Find the GPU.

        Raises:
            LookupError: NVML does not know the GPU.
            NvmlError: The GPU cannot be used.
        """
        self._library = library
        self._own, whole = c_void_p(), c_void_p()
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        if not self._has("nvmlDeviceGetHandleByUUID", c_char_p(name.encode()), byref(self._own)):
            raise LookupError(name)
        is_instance = self._has("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", self._own, byref(whole))
        self._whole = whole if is_instance else self._own

    def _has(self, name: str, *arguments: Any) -> bool:
        return _call(self._library, name, *arguments)

    def memory(self) -> tuple[int, int] | None:
        """Return the bytes of memory in use, and in all."""
        memory = _Memory()
        return (memory.used, memory.total) if self._has("nvmlDeviceGetMemoryInfo", self._own, byref(memory)) else None

    def processes(self) -> dict[int, int]:
        """Return each process's bytes of GPU memory (0: unknown). Processes outside the container are left out."""
        count, found = c_uint(MAX_PROCESSES), (_Process * MAX_PROCESSES)()
        if not self._has("nvmlDeviceGetComputeRunningProcesses_v3", self._own, byref(count), found):
            return {}
        return {each.pid: 0 if each.memory == UNKNOWN_SIZE else each.memory for each in found[: count.value]}

    def utilization(self) -> float | None:
        """Return the share of time, from 0 to 1, in which the GPU had work lately."""
        rates = _Rates()
        return rates.gpu / 100 if self._has("nvmlDeviceGetUtilizationRates", self._own, byref(rates)) else None

    def number(self, name: str, number: Any, *arguments: Any) -> int | None:
        """Return the number that a function of NVML writes to its last argument, of the type of `number`."""
        return int(number.value) if self._has(name, self._whole, *arguments, byref(number)) else None

    def ecc_errors(self) -> int | None:
        """Return the number of uncorrectable memory errors since the driver was loaded or the GPU was reset."""
        return self.number("nvmlDeviceGetTotalEccErrors", c_ulonglong(), c_uint(UNCORRECTED), c_uint(SINCE_LOAD))

    def remapping(self) -> tuple[bool, bool]:
        """Return whether a row of memory waits to be remapped at a reset, and whether one could not be remapped."""
        pending, failed = c_uint(), c_uint()
        others = byref(c_uint()), byref(c_uint())
        self._has("nvmlDeviceGetRemappedRows", self._whole, *others, byref(pending), byref(failed))
        return bool(pending.value), bool(failed.value)

    def is_retirement_pending(self) -> bool:
        """Return True if a page of memory waits to be retired at a reset. GPUs before Ampere retire pages."""
        return bool(self.number("nvmlDeviceGetRetiredPagesPendingStatus", c_uint()))

    def recovery(self) -> int | None:
        """Return the action that the driver asks for: 0 none, 1 a reset, 2 a reboot, 3 and 4 a reset after all work."""
        asked = _FieldValue(field=RECOVERY_FIELD)
        is_known = self._has("nvmlDeviceGetFieldValues", self._whole, c_int(1), byref(asked)) and asked.code == SUCCESS
        return int(asked.value) if is_known else None

    def fabric_error(self) -> int:
        """Return the error code of the GPU's attempt to join its NVLink fabric. 0: none, or the attempt goes on."""
        fabric = _Fabric()
        has_ended = (
            self._has("nvmlDeviceGetGpuFabricInfo", self._whole, byref(fabric)) and fabric.state == FABRIC_COMPLETE
        )
        return int(fabric.status) if has_ended else 0

    def slowdowns(self) -> list[str]:
        """Return the causes that slow down the GPU's clocks now, in words."""
        bits = self.number("nvmlDeviceGetCurrentClocksThrottleReasons", c_ulonglong()) or 0
        return [cause for bit, cause in SLOWDOWNS.items() if bits & bit]

    def address(self) -> str:
        """Return the PCI address as the kernel's log writes it, such as 0000:3b:00. Empty if unknown."""
        pci = _PciInfo()
        is_known = self._has("nvmlDeviceGetPciInfo_v3", self._whole, byref(pci))
        return f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}" if is_known else ""
