"""Keeps a rank beside its GPU, on a machine whose memory is in several nodes."""

import os
from pathlib import Path
from typing import Any

SYSTEM = Path("/sys")


def stay_beside(device: int, system: Path = SYSTEM) -> None:
    """Run this thread, and those it starts, on the cores of the node that the GPU belongs to.

    Memory follows, since Linux gives a page from the node of the core that first writes to it. This is what `torchrun
    --numa-binding=node` does. Nothing happens where there is one node, or where nobody knows which is the GPU's.

    Args:
        device: The GPU's index among those that are visible.
        system: Where the kernel tells of its devices.
    """
    if sum(1 for _ in system.glob("devices/system/node/node[0-9]*")) < 2:
        return
    try:
        node = int((system / "bus/pci/devices" / _address(device) / "numa_node").read_text())
        cores = _numbers((system / f"devices/system/node/node{node}/cpulist").read_text())
    except (OSError, ValueError):  # a virtual machine may hide it; -1 is a node without a file
        return
    if allowed := cores & os.sched_getaffinity(0):
        os.sched_setaffinity(0, allowed)


def _address(device: int) -> str:
    """A GPU's address on the PCI bus, as the kernel writes it."""
    import torch

    found: Any = torch.cuda.get_device_properties(device)
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def _numbers(ranges: str) -> set[int]:
    """Of "0-2,8", 0, 1, 2 and 8."""
    ends = [part.split("-") for part in ranges.strip().split(",") if part]
    return {number for first, *last in ends for number in range(int(first), int((last or [first])[0]) + 1)}
