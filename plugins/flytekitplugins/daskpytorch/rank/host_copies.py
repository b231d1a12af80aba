"""Copies tensors to host memory that the next save reuses. Runs in a rank.

Copies from a GPU go to one page-locked block of just the needed size. Torch's own allocator for page-locked memory
rounds each tensor up to a power of two.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


PAGE = 4096
ALIGNMENT = 64
"""Alignment of each tensor's copy, in bytes."""


class HostCopies:
    """Host memory for copies of tensors with given shapes, strides and dtypes."""

    def __init__(self, like: Sequence[torch.Tensor]) -> None:
        locked = _page_locked([tensor for tensor in like if tensor.is_cuda])
        self.tensors = [next(locked) if tensor.is_cuda else torch.empty_like(tensor, device="cpu") for tensor in like]
        """Copies, in order of the originals."""

    def fill(self, originals: Sequence[torch.Tensor]) -> None:
        """Copy these tensors, and wait for their devices."""
        for copy, original in zip(self.tensors, originals, strict=True):
            copy.copy_(original, non_blocking=True)
        for device in {tensor.device for tensor in originals if tensor.device.type != "cpu"}:
            torch.get_device_module(device).synchronize(device)


def _page_locked(like: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield CPU tensors in one page-locked block, or in pageable memory if the block cannot be locked."""
    if not like:
        return
    starts, end = [], 0
    for tensor in like:
        starts.append(end)
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    memory = torch.empty(end + PAGE, dtype=torch.uint8).numpy()  # numpy: each slice becomes a storage of its own
    first = -memory.ctypes.data % PAGE  # CUDA refuses to lock a page twice: the block shares no page
    _lock(memory, memory.ctypes.data + first, end, like[0].device)
    for tensor, start in zip(like, starts, strict=True):
        begin = first + start
        flat = torch.from_numpy(memory[begin : begin + tensor.nbytes]).view(tensor.dtype)
        yield flat.as_strided(tensor.shape, torch.empty_like(tensor, device="meta").stride())


def _lock(memory: npt.NDArray[np.uint8], address: int, size: int, device: torch.device) -> None:
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = cudart.cudaHostRegister(address, size, 0)
    if int(error) == 0:
        weakref.finalize(memory.base, cudart.cudaHostUnregister, address).atexit = False
        return
    with contextlib.suppress(RuntimeError):  # CUDA reports the failed call again at the next kernel's start
        torch.ones(1, device=device)
    print(
        f"{size:,} bytes of memory for copies of GPU tensors could not be page-locked ({error}): each save_sharded "
        "holds the training up longer. Raise the container's memory limit, or save less.",
        file=sys.stderr,
    )
