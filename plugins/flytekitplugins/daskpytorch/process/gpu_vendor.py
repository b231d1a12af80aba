"""GPU vendors, NVIDIA and AMD: their drivers, variables, and the library that knows a GPU. Runs everywhere.

Only this file imports `pynvml` (nvidia-ml-py) and `amdsmi` (of ROCm). A container without the driver capability
`utility` lacks NVML's library. Without its library, a GPU has no known faults and no known usage.

Torch's build for ROCm says CUDA for HIP, and HIP reads `CUDA_VISIBLE_DEVICES` where its own variable is missing.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

NVIDIA_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
AMD_DRIVER, AMD_DEVICES = Path("/dev/kfd"), Path("/sys/class/kfd/kfd/topology/nodes")
VISIBLE, OF_CONTAINER, OF_HIP = "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
"""Kubernetes' device plugin sets the second for a container, and users set the others for a process."""
ASKING_VARIABLES = (OF_CONTAINER, VISIBLE)
AMD_VARIABLES = (OF_HIP, "ROCR_VISIBLE_DEVICES", VISIBLE)
"""Each hides GPUs from a process."""
NO_LIST = ("all", "none", "void")
RECOVERIES = {1: "a reset", 2: "a reboot of its host"}
PENDING, NOT_RESERVABLE = 1, 2
"""States of a bad page of memory in AMD SMI. The third is 0: reserved, and out of use."""


class GpuLostError(Exception):
    """The driver reports a GPU that cannot be used."""


class Nvidia:
    title, tool, reset = "NVML", "nvidia-smi", "nvidia-smi --gpu-reset"

    def visible(self) -> list[str]:
        return listed(VISIBLE)

    def find(self, uuid: str) -> Any:
        _begin_nvml(os.getpid())
        return self.ask("nvmlDeviceGetHandleByUUID", uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")

    def usage(self, gpu: Any) -> tuple[int | None, float | None]:
        """A MIG instance has memory of its own, and all else of its GPU."""
        memory, rates = self.ask("nvmlDeviceGetMemoryInfo", gpu), self.ask("nvmlDeviceGetUtilizationRates", gpu)
        return None if memory is None else memory.used, None if rates is None else rates.gpu / 100

    def faults(self, gpu: Any) -> Iterator[str]:
        import pynvml

        whole = self.ask("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", gpu) or gpu
        what = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
        if errors := self.ask("nvmlDeviceGetTotalEccErrors", whole, *what):
            yield f"{errors} uncorrectable memory errors (ECC) since its driver was loaded"
        _, _, is_pending, has_failed = self.ask("nvmlDeviceGetRemappedRows", whole) or (0, 0, 0, 0)
        if has_failed:
            yield "a row of its memory could not be remapped"
        if is_pending:
            yield "a row of its memory waits to be remapped at a reset"
        action = pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
        [asked] = self.ask("nvmlDeviceGetFieldValues", whole, [action]) or [None]
        if asked is not None and asked.nvmlReturn == pynvml.NVML_SUCCESS and asked.value.uiVal:
            yield f"its driver asks for {RECOVERIES.get(asked.value.uiVal, 'a reset after all work has left the GPU')}"

    def ask(self, name: str, *arguments: Any) -> Any:
        import pynvml

        try:
            return getattr(pynvml, name)(*arguments)
        except (pynvml.NVMLError_IrqIssue, pynvml.NVMLError_GpuIsLost, pynvml.NVMLError_ResetRequired) as error:
            raise GpuLostError(f"NVML's {name} says: {error}") from error
        except pynvml.NVMLError:  # CUDA, which has a library of its own, may work
            return None


class Amd:
    title, tool, reset = "AMD SMI", "amd-smi", "amd-smi reset --gpureset"

    def visible(self) -> list[str]:
        return listed(OF_HIP) or listed(VISIBLE)

    def find(self, uuid: str) -> Any:
        self.ask("amdsmi_init")
        return self.ask("amdsmi_get_processor_handle_from_bdf", uuid)

    def usage(self, gpu: Any) -> tuple[int | None, float | None]:
        memory = _number(self.ask("amdsmi_get_gpu_vram_usage", gpu), "vram_used")  # MiB
        percent = _number(self.ask("amdsmi_get_gpu_activity", gpu), "gfx_activity")
        return None if memory is None else memory << 20, None if percent is None else percent / 100

    def faults(self, gpu: Any) -> Iterator[str]:
        if errors := _number(self.ask("amdsmi_get_gpu_total_ecc_count", gpu), "uncorrectable_count"):
            yield f"{errors} uncorrectable memory errors (ECC) since its driver was loaded"
        states = {page["status"] for page in self.ask("amdsmi_get_gpu_bad_page_info", gpu) or ()}
        if NOT_RESERVABLE in states:
            yield "a bad page of its memory cannot be put out of use"
        if PENDING in states:
            yield "a bad page of its memory waits to be put out of use at a reset"

    def ask(self, name: str, *arguments: Any) -> Any:
        try:
            import amdsmi

            return getattr(amdsmi, name)(*arguments)
        except Exception:  # not installed, its library missing, `AmdSmiException`: HIP, with its own library, may work
            return None


def vendor_of(uuid: str) -> Nvidia | Amd:
    """A GPU of AMD's is known by its PCI address, as AMD's libraries disagree about UUIDs."""
    return Amd() if ":" in uuid else Nvidia()


def vendor_here() -> Nvidia | Amd:
    return Amd() if num_amd_gpus() else Nvidia()


def usage(uuid: str) -> tuple[int | None, float | None]:
    """Return bytes in use, and the share of time (0 to 1) with work lately. None: unknown."""
    vendor = vendor_of(uuid)
    with contextlib.suppress(GpuLostError):
        if (gpu := vendor.find(uuid)) is not None:
            return vendor.usage(gpu)
    return None, None


def faults_of(uuid: str) -> list[str]:
    vendor = vendor_of(uuid)
    try:
        gpu = vendor.find(uuid)
        return [] if gpu is None else list(vendor.faults(gpu))
    except GpuLostError as error:
        return [str(error)]


def has_driver() -> bool:
    return num_amd_gpus() > 0 or has_nvidias_driver()


def has_nvidias_driver() -> bool:
    return any(file.exists() for file in NVIDIA_FILES)


def num_amd_gpus() -> int:
    """Count AMD GPUs that have cards of their own: those inside a processor, as in laptops, do not count."""
    if not os.access(AMD_DRIVER, os.R_OK | os.W_OK):
        return 0
    return sum(map(_is_card, AMD_DEVICES.glob("*/properties")))


def are_amd_gpus_hidden() -> bool:
    return any(variable in os.environ and not listed(variable) for variable in AMD_VARIABLES)


def asked_for(limit: int) -> tuple[str, int]:
    """Return what asks for most GPUs here, the worker's limit or a variable, and their number."""
    asked = {"the limits": limit, VISIBLE: len(listed(VISIBLE)) if has_nvidias_driver() else 0}
    if VISIBLE not in os.environ or limit:  # a process may get only some of its container's GPUs
        asked[OF_CONTAINER] = len(listed(OF_CONTAINER))
    return max(asked.items(), key=lambda item: item[1])


def listed(variable: str) -> list[str]:
    gpus: list[str] = []
    for gpu in map(str.strip, os.environ.get(variable, "").split(",")):
        if gpu in ("", "-1", *NO_LIST):
            break
        gpus.append(gpu)
    return gpus


def instances() -> list[str]:
    return [gpu for gpu in listed(OF_CONTAINER) if gpu.startswith("MIG-")]


def variables_for(gpus: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that show a process only these GPUs. HIP's own would win."""
    shown = ",".join(gpus)
    return {VISIBLE: shown, OF_HIP: shown} if gpus and OF_HIP in environment else {VISIBLE: shown}


def _is_card(properties: Path) -> bool:
    try:
        values = dict(map(str.split, properties.read_text().splitlines()))
    except OSError:  # the kernel refuses a container the properties of GPUs that it has not got (EPERM)
        return False
    return int(values["simd_count"]) > 0 and int(values["cpu_cores_count"]) == 0


def _number(answer: Any, name: str) -> int | None:
    """AMD SMI answers "N/A" for what a GPU does not have."""
    value = None if answer is None else answer[name]
    return value if isinstance(value, int) else None


@functools.lru_cache(maxsize=1)
def _begin_nvml(pid: int) -> None:  # noqa: ARG001 - a forked child initialises NVML again
    Nvidia().ask("nvmlInit")
