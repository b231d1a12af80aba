"""Errors of CUDA, NCCL and NVML, told apart by their text: a broken GPU, or too little memory.

The texts are those of CUDA 13's runtime, of NCCL 2.28 and of torch 2.6 to 2.15.
"""

import re

GPU_FAULT = re.compile(
    r"uncorrectable (ECC|NVLink) error|over nvlink or a hardware error|is/are busy or unavailable"
    r"|(CUDA error: |Error 802: |Cuda failure (802 )?')system not yet initialized"
    r"|GPU is lost|fallen off the bus|\bXid\b.{0,40}\b79\b"
    r"|nvml\w+\([^)]*\) failed|(Failed to|Can't) initialize NVML|NVML_SUCCESS == (?!.*CachingAllocator)",
    re.IGNORECASE,
)
"""A GPU, its links, its fabric or its driver has failed, whatever the code does.

Left out are errors that code may cause, too: "unspecified launch failure", "hardware stack error" and "initialization
error". Torch's allocator asks NVML only where memory is short, so its failed question is left out as well.
"""
NCCL_MEMORY = re.compile(
    r"Cuda failure (\d+ )?'out of memory'|Failed to CUDA (malloc|calloc|host alloc)", re.IGNORECASE
)
"""NCCL has found too little memory on the rank's own GPU. Its error has the type that a lost peer has, too."""


def find_gpu_fault(text: str) -> str:
    """Return the line in which an error's text, or a log, says that a GPU has failed; "" without one."""
    return next((line.strip() for line in text.splitlines() if GPU_FAULT.search(line)), "")


def is_memory_of_nccl(text: str) -> bool:
    """Return True if an error's text says that NCCL has found too little memory."""
    return NCCL_MEMORY.search(text) is not None
