"""Recognises failed GPUs: by errors' texts, by lines of logs, and by a rank's check of its GPU before use."""

import re

# The texts of GPUs' errors are those of CUDA 13's runtime, of NCCL 2.28 and of torch 2.6 to 2.15.
GPU_FAULT = re.compile(
    r"uncorrectable (ECC|NVLink) error|over nvlink or a hardware error|is/are busy or unavailable"
    r"|(CUDA error: |Error 802: |Cuda failure (802 )?')system not yet initialized"
    r"|GPU is lost|fallen off the bus|\bXid\b.{0,40}\b79\b"
    r"|nvml\w+\([^)]*\) failed|(Failed to|Can't) initialize NVML|NVML_SUCCESS == (?!.*CachingAllocator)",
    re.IGNORECASE,
)
"""Texts of errors that only a failed GPU, NVLink connection, GPU fabric or GPU driver causes.

Errors that code may cause, too, are left out: "unspecified launch failure", "hardware stack error" and "initialization
error". Torch's allocator queries NVML only if memory is short, so its failed query is left out as well.
"""


class GpuFaultError(RuntimeError):
    """A rank's GPU did not pass its check before use. The text is one line with the reason."""


def is_of_check(error: BaseException) -> bool:
    """Return True if a GPU has not passed its check, except by an exception of the user's function."""
    return isinstance(error, GpuFaultError) and error.__cause__ is None


def fault_of(error: BaseException) -> str:
    """Return the line of an exception's text that reports a failed GPU. Return "" for other exceptions.

    Torch raises a `RuntimeError` for a failed GPU, nvidia-ml-py raises its own class, and the check `GpuFaultError`.
    """
    if isinstance(error, GpuFaultError):
        return str(error)
    is_of_gpu = isinstance(error, RuntimeError) or type(error).__name__.startswith("NVMLError")
    try:
        return fault_in(str(error)) if is_of_gpu else ""
    except BaseException:  # a user's own class may raise any exception
        return ""


def fault_in(text: str) -> str:
    """Return the line of an error's text, or of a log, that reports a failed GPU. Return "" if no line does."""
    return next((line.strip() for line in text.splitlines() if GPU_FAULT.search(line)), "")
