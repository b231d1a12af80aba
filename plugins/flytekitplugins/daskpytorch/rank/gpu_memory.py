"""Explains a rank's CUDA out-of-memory error: what holds the GPU's memory, by torch's snapshot and NVML.

Runs in the rank. A rank that does not run out of memory spends nothing.
"""

from __future__ import annotations

import os
import pickle
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from flytekitplugins.daskpytorch.process.system import optional
from flytekitplugins.daskpytorch.process.worker import in_thread
from flytekitplugins.daskpytorch.protocol import torch_parts
from flytekitplugins.daskpytorch.protocol.failure import NOT_THE_USERS, with_causes
from flytekitplugins.daskpytorch.protocol.job import RankOrder
from flytekitplugins.daskpytorch.rank import nvml
from flytekitplugins.daskpytorch.rank.gpu_check import THREAD

HISTORY_VARIABLE = "DASKPYTORCH_MEMORY_HISTORY"
"""Environment variable that makes torch record the line of each allocation on the GPU, if its value is 1."""
NUM_SHOWN = 5
"""Number of the largest groups of live allocations in the error."""
MAX_SNAPSHOT = 64 << 20
"""Maximum number of bytes of a snapshot that is submitted."""
PICKLE_PROTOCOL = 4
"""Newest protocol of pickle that pytorch.org/memory_viz reads."""
NVML_TIMEOUT = 5.0
"""Timeout, in seconds, for NVML's list of the GPU's processes."""
LIVE = ("active_allocated", "active_awaiting_free", "active_pending_free")
"""States of blocks in torch's snapshot that no other allocation can use."""
DEVICE = re.compile(r"\bGPU (\d+) has a total capacity")
"""Pattern of the device's index in torch's error."""


def record(order: RankOrder) -> None:
    """Make torch record the line of each allocation, if the user's environment asks for that. Initialises CUDA."""
    if order.place.gpu is not None and os.environ.get(HISTORY_VARIABLE) == "1":
        with optional(f"Recording the lines of allocations ({HISTORY_VARIABLE})"):
            torch_parts.record_memory()


def explain(
    error: BaseException, order: RankOrder, submit: Callable[[str, bytes], None], call: int | None = None
) -> None:
    """Add what holds the GPU's memory to a CUDA out-of-memory error, and submit torch's snapshot of the memory.

    Other errors stay as they are.

    Args:
        error: The exception that ends the rank.
        order: The rank's order.
        submit: Sends the driver a result file: the file's path and its content.
        call: Number of the call that raised the exception, in a gang that stays. None: a gang of one call.
    """
    if (cause := _out_of_memory(error)) is None:
        return
    place = order.place
    with optional("Explaining what holds the GPU's memory"):
        named = DEVICE.search(str(cause))
        device = int(named[1]) if named else place.device_index or 0
        notes: list[str] = []
        with optional("Reading torch's snapshot of the GPU's memory"):
            snapshot = torch_parts.memory_snapshot()
            notes += describe(snapshot, device)
            number = f"{order.job.attempt}" if call is None else f"call-{call}"  # a gang that stays has one attempt
            path = f"profiles/rank-{place.rank}-out-of-memory-{number}.pickle"
            if len(data := pickle.dumps(snapshot, PICKLE_PROTOCOL)) <= MAX_SNAPSHOT:
                submit(path, data)
                notes.append(f"Snapshot of the memory: {path} among the results (open it at pytorch.org/memory_viz).")
        if place.gpu_uuid and device == place.device_index:
            notes += _others(place.gpu_uuid)
        if notes:
            error.add_note("\n".join(notes))


def _out_of_memory(error: BaseException) -> BaseException | None:
    """Return torch's error of a GPU without memory: the error itself, or the first such cause. None without one."""
    torch = sys.modules.get("torch")  # not imported here: a failed import of torch may be the error
    if torch is None:
        return None
    return next((each for each in with_causes(error) if isinstance(each, torch.OutOfMemoryError)), None)


# ---- Torch's snapshot


def describe(snapshot: Mapping[str, Any], device: int) -> Iterator[str]:
    """Yield lines about a device's memory: what torch has reserved and allocated, and the largest live allocations.

    Args:
        snapshot: Snapshot of `torch_parts.memory_snapshot()`.
        device: CUDA index of the device.
    """
    segments = [segment for segment in snapshot["segments"] if segment.get("device", device) == device]
    blocks = [block for segment in segments for block in segment["blocks"]]
    reserved = sum(segment["total_size"] for segment in segments)
    live = [block for block in blocks if block["state"] in LIVE]
    free = [block["size"] for block in blocks if block["state"] not in LIVE]
    text = f"Torch's memory on CUDA device {device}: {_size(reserved)} reserved"
    text += f", of which {_size(sum(block['size'] for block in live))} are allocated"
    yield text + (f" and {_size(sum(free))} are free, in pieces of at most {_size(max(free))}." if free else ".")
    if not live:
        return
    sizes: Counter[str] = Counter()
    nums: Counter[str] = Counter()
    for block in live:
        where = _line_of(block.get("frames", ())) or f"a line that torch has not recorded, {_size(block['size'])} each"
        sizes[where] += block["size"]
        nums[where] += 1
    yield "Largest live allocations:"
    for where, size in sizes.most_common(NUM_SHOWN):
        yield f"  {_size(size)} in {nums[where]:,}: {where}"
    if not any(block.get("frames") for block in live):
        yield f'Gang(environment={{"{HISTORY_VARIABLE}": "1"}}) records the line of each allocation.'


def _line_of(frames: Sequence[Mapping[str, Any]]) -> str:
    """Return the user's innermost line in a stack of torch, whose first frame is the innermost. Return "" without."""
    for frame in frames:
        file = str(frame.get("filename", ""))
        if file.endswith(".py") and not NOT_THE_USERS.match(file):
            return f"{file}:{frame.get('line')} in {frame.get('name')}"
    return ""


# ---- Other processes


def _others(uuid: str) -> list[str]:
    """Return a line about the memory that other processes hold on a GPU. Empty if NVML does not know."""

    def asked() -> tuple[tuple[int, int] | None, dict[int, int]]:
        gpu = nvml.gpu(uuid)
        return (gpu.memory(), gpu.processes()) if gpu is not None else (None, {})

    try:
        memory, processes = in_thread(asked, THREAD).result(NVML_TIMEOUT)
    except (TimeoutError, nvml.NvmlError) as error:
        return [f"NVML gives no list of the GPU's processes ({str(error) or 'no answer'})."]
    if memory is None:
        return []
    used, total = memory
    others = {pid: size for pid, size in processes.items() if pid != os.getpid()}
    by_size = sorted(others.items(), key=lambda item: -item[1])[:NUM_SHOWN]
    named = ", ".join(f"process {pid} {_size(size)}" for pid, size in by_size)
    return [
        f"In use on the GPU: {_size(used)} of {_size(total)}, by other processes: {named or 'none that NVML sees'}."
    ]


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"
