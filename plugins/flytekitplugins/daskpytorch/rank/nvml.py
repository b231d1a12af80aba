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
from collections.abc import Iterator, Mapping
from ctypes import byref, c_char, c_char_p, c_int, c_longlong, c_ubyte, c_uint, c_ulonglong, c_void_p
from dataclasses import dataclass, field
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
SM_CLOCK, GPU_SENSOR = 1, 0
"""Arguments of NVML: the clock of the streaming multiprocessors, and the temperature sensor of the GPU's chip."""
UNCORRECTED, SINCE_LOAD = 1, 0
"""Arguments of NVML: uncorrectable memory errors, and counters since the driver was loaded."""
RECOVERY_FIELD = 230
"""Number of NVML's field for the action that a GPU needs, which drivers from 550 on have."""
SLOWDOWNS = {0x08: "hardware", 0x40: "heat", 0x80: "its power supply"}
"""Bits of NVML's clock limits that slow a GPU down by half or more, with the cause."""
MAX_PROCESSES = 64
UNKNOWN_SIZE = (1 << 64) - 1
"""Memory of a process whose size NVML does not know."""


_logger = logging.getLogger(__name__)


class NvmlError(Exception):
    """NVML reports a GPU or driver that cannot be used."""


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """State of one GPU. None: the GPU or its driver does not have the value."""

    ecc_errors: int | None = None
    """Number of uncorrectable memory errors since the driver was loaded or the GPU was reset."""
    is_remap_pending: bool | None = None
    """True if a row of memory waits to be remapped at the GPU's next reset."""
    has_remap_failed: bool | None = None
    """True if a row of memory could not be remapped."""
    is_retirement_pending: bool | None = None
    """True if a page of memory waits to be retired at the GPU's next reset. GPUs before Ampere have this value."""
    recovery: int | None = None
    """Action that the driver asks for: 0 none, 1 a reset, 2 a reboot, 3 and 4 a reset after all work has left."""
    fabric: tuple[int, int] | None = None
    """State of the GPU in its NVLink fabric (0: none, 1: not started, 2: starting, 3: complete), and an error code."""
    slowdowns: int | None = None
    """Causes that slow down the GPU's clocks now, as a sum of bits."""
    memory: tuple[int, int] | None = None
    """Bytes of memory in use, and in all."""
    processes: Mapping[int, int] = field(default_factory=dict)
    """Process ID -> bytes of GPU memory (0: unknown). Processes outside the container are left out."""
    address: str = ""
    """PCI address as the kernel's log writes it, such as 0000:3b:00."""


def read(uuid: str) -> GpuState | None:
    """Return the state of a GPU or MIG instance. None: NVML is not installed here, or does not know the GPU.

    Args:
        uuid: The UUID, with or without the prefix `GPU-`.

    Raises:
        NvmlError: The GPU or its driver cannot be used.
    """
    with contextlib.suppress(OSError, LookupError), _opened() as nvml:
        return nvml.state_of(nvml.find(uuid))
    return None


def usage(uuid: str) -> tuple[int | None, float | None]:
    """Return a GPU's memory in use, in bytes, and the share of time from 0 to 1 in which the GPU had work lately.

    A value is None if NVML does not know the value.

    Args:
        uuid: The UUID, with or without the prefix `GPU-`.
    """
    with contextlib.suppress(OSError, LookupError, NvmlError):
        nvml = _kept(LIBRARY, os.getpid())
        device, memory, rates = nvml.find(uuid), _Memory(), _Rates()
        has_memory = nvml.call("nvmlDeviceGetMemoryInfo", device, byref(memory))
        has_rates = nvml.call("nvmlDeviceGetUtilizationRates", device, byref(rates))
        return int(memory.used) if has_memory else None, int(rates.gpu) / 100 if has_rates else None
    return None, None


def clock_and_temperature(uuid: str) -> tuple[int | None, int | None]:
    """Return the clock of a GPU's multiprocessors in MHz, and its temperature in degrees Celsius. None: unknown.

    Args:
        uuid: The UUID, with or without the prefix `GPU-`. A MIG instance has the values of its GPU.
    """
    with contextlib.suppress(OSError, LookupError, NvmlError):
        nvml = _kept(LIBRARY, os.getpid())
        device = nvml.whole_of(nvml.find(uuid))
        clock = nvml.number("nvmlDeviceGetClockInfo", device, c_int(SM_CLOCK), c_uint())
        return clock, nvml.number("nvmlDeviceGetTemperature", device, c_int(GPU_SENSOR), c_uint())
    return None, None


@functools.lru_cache(maxsize=1)
def _kept(library: str, pid: int) -> _Nvml:  # noqa: ARG001 - a forked child needs its own
    """Load and initialise NVML once for this process. The initialisation takes long for a sample each two seconds.

    Raises as `_open`.
    """
    return _open(library)


def _open(library: str) -> _Nvml:
    """Load and initialise NVML.

    Raises:
        OSError: NVML is not installed here, or may not be used.
        NvmlError: The driver cannot be used.
    """
    nvml = _Nvml(ctypes.CDLL(library))
    if not nvml.call("nvmlInit_v2"):
        raise OSError("NVML could not be initialised")
    return nvml


@functools.cache
def _warn(code: int) -> None:
    _logger.warning(
        "NVML (%s) cannot be used here: %s (code %d). This rank's GPU is checked and sampled without NVML. The image "
        "may have a version of the library that the host's driver does not suit",
        LIBRARY,
        NO_DRIVER[code],
        code,
    )


@contextlib.contextmanager
def _opened() -> Iterator[_Nvml]:
    """Load and initialise NVML for the block. Raises as `_open`."""
    nvml = _open(LIBRARY)
    try:
        yield nvml
    finally:
        nvml.call("nvmlShutdown")


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


class _Nvml:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def call(self, name: str, *arguments: Any) -> bool:
        """Call a function of NVML. Return False if the driver, GPU or user may not have what was asked for.

        Raises:
            NvmlError: The GPU or its driver cannot be used.
        """
        function = getattr(self._library, name, None)
        if function is None:  # an older driver
            return False
        code = function(*arguments)
        if code in BROKEN:
            raise NvmlError(f"NVML's {name} says: {BROKEN[code]} (code {code})")
        if code in NO_DRIVER:
            _warn(code)
        return bool(code == SUCCESS)

    def find(self, uuid: str) -> c_void_p:
        """Return NVML's handle of a GPU or MIG instance.

        Raises:
            LookupError: NVML does not know the GPU.
            NvmlError: The GPU cannot be used.
        """
        device, name = c_void_p(), uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        if not self.call("nvmlDeviceGetHandleByUUID", c_char_p(name.encode()), byref(device)):
            raise LookupError(name)
        return device

    def state_of(self, device: c_void_p) -> GpuState:
        """Return the state of a GPU. A MIG instance has its own memory, and all else from its GPU."""
        memory, processes = self._memory(device)
        device = self.whole_of(device)
        pending, failed = c_uint(), c_uint()
        has_rows = self.call(
            "nvmlDeviceGetRemappedRows", device, byref(c_uint()), byref(c_uint()), byref(pending), byref(failed)
        )
        retiring = self.number("nvmlDeviceGetRetiredPagesPendingStatus", device, c_uint())
        return GpuState(
            ecc_errors=self.number(
                "nvmlDeviceGetTotalEccErrors", device, c_uint(UNCORRECTED), c_uint(SINCE_LOAD), c_ulonglong()
            ),
            is_remap_pending=bool(pending.value) if has_rows else None,
            has_remap_failed=bool(failed.value) if has_rows else None,
            is_retirement_pending=None if retiring is None else bool(retiring),
            recovery=self._recovery(device),
            fabric=self._fabric(device),
            slowdowns=self.number("nvmlDeviceGetCurrentClocksThrottleReasons", device, c_ulonglong()),
            memory=memory,
            processes=processes,
            address=self._address(device),
        )

    def whole_of(self, device: c_void_p) -> c_void_p:
        """Return the handle of a MIG instance's GPU, or the handle of a GPU itself."""
        whole = c_void_p()
        return whole if self.call("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", device, byref(whole)) else device

    def number(self, name: str, *arguments: Any) -> int | None:
        """Return the value that a function writes to its last argument. None: unknown."""
        *others, number = arguments
        return int(number.value) if self.call(name, *others, byref(number)) else None

    def _memory(self, device: c_void_p) -> tuple[tuple[int, int] | None, dict[int, int]]:
        memory, count = _Memory(), c_uint(MAX_PROCESSES)
        has_memory = self.call("nvmlDeviceGetMemoryInfo", device, byref(memory))
        found = (_Process * MAX_PROCESSES)()
        if not self.call("nvmlDeviceGetComputeRunningProcesses_v3", device, byref(count), found):
            count = c_uint(0)
        sizes = {each.pid: 0 if each.memory == UNKNOWN_SIZE else each.memory for each in found[: count.value]}
        return (memory.used, memory.total) if has_memory else None, sizes

    def _recovery(self, device: c_void_p) -> int | None:
        asked = _FieldValue(field=RECOVERY_FIELD)
        is_known = self.call("nvmlDeviceGetFieldValues", device, c_int(1), byref(asked)) and asked.code == SUCCESS
        return int(asked.value) if is_known else None

    def _fabric(self, device: c_void_p) -> tuple[int, int] | None:
        fabric = _Fabric()
        is_known = self.call("nvmlDeviceGetGpuFabricInfo", device, byref(fabric))
        return (fabric.state, fabric.status) if is_known else None

    def _address(self, device: c_void_p) -> str:
        pci = _PciInfo()
        if not self.call("nvmlDeviceGetPciInfo_v3", device, byref(pci)):
            return ""
        return f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}"
