"""Binds a rank to the CPU cores near its GPU, on a host with several NUMA nodes."""

import os
from pathlib import Path
from typing import Any

SYSTEM = Path("/sys")


def stay_beside(device: int, system: Path = SYSTEM) -> None:
    """Run this thread, and the threads that it starts, on the cores of the GPU's NUMA node.

    Memory follows the cores, as Linux takes a page from the node of the core that first writes to the page. `torchrun
    --numa-binding=node` does the same. Hosts with one node, and GPUs whose node is unknown, keep the old
    binding.

    Args:
        device: CUDA index of the GPU among the visible GPUs.
        system: Folder of the kernel's sysfs.
    """
    if sum(1 for _ in system.glob("devices/system/node/node[0-9]*")) < 2:
        return
    try:
        node = int((system / "bus/pci/devices" / _address(device) / "numa_node").read_text())
        cores = _numbers((system / f"devices/system/node/node{node}/cpulist").read_text())
    except (OSError, ValueError):  # a virtual machine may hide the node, or give -1, which has no file
        return
    if allowed := cores & os.sched_getaffinity(0):
        os.sched_setaffinity(0, allowed)


def _address(device: int) -> str:
    """Return a GPU's PCI address in the kernel's form."""
    import torch

    found: Any = torch.cuda.get_device_properties(device)
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def _numbers(ranges: str) -> set[int]:
    """Return the numbers of a list of ranges: 0, 1, 2 and 8 for "0-2,8"."""
    ends = [part.split("-") for part in ranges.strip().split(",") if part]
    return {number for first, *last in ends for number in range(int(first), int((last or [first])[0]) + 1)}
