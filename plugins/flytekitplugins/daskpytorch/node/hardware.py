"""What a worker's node has to offer: cores, GPUs, its way to the driver, versions. Runs on the workers."""

import asyncio
import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import psutil

from flytekitplugins.daskpytorch.protocol.placement import Node

__all__ = ["describe_node", "gpus_here", "host_and_gpus", "interface_of", "local_versions", "num_kills_for_memory"]

CONTROL_GROUPS = Path("/sys/fs/cgroup")


def describe_node(worker: str, interface: str | None) -> Node:
    """Say what this node has to offer."""
    from dask.system import cpu_count  # knows the limits of containers; outside Dask's workers it takes 0.3 s to import

    gpus = gpus_here()
    return Node(
        worker=worker,
        host=socket.gethostname(),
        num_cores=cpu_count(),
        gpus=tuple(gpus),
        gpu_names=tuple(gpus.values()),
        interface=interface,
        versions=local_versions(),
    )


@functools.cache  # reading them takes 8 ms
def local_versions() -> dict[str, str]:
    """The versions that driver and workers must share."""
    packages = ("flytekitplugins-daskpytorch", "torch")
    return {"python": ".".join(map(str, sys.version_info[:2]))} | {name: version(name) for name in packages}


def interface_of(address: str) -> str | None:
    """The network interface that has this address."""
    if address.startswith("127."):
        return "lo"
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == address for entry in addresses):
            return name
    return None


def num_kills_for_memory() -> int:
    """How often the kernel has killed for memory in this process's control group, of either version; 0 without one."""
    for file in _memory_records():
        with contextlib.suppress(OSError, ValueError):
            for line in file.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return 0


def _memory_records() -> Iterator[Path]:
    """Where that may be written: below the group's own path, and where a container sees its group as the root."""
    groups: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            groups |= dict.fromkeys(controllers.split(","), path.strip("/"))
    if "memory" in groups:
        yield CONTROL_GROUPS / "memory" / groups["memory"] / "memory.oom_control"
        yield CONTROL_GROUPS / "memory" / "memory.oom_control"
    yield CONTROL_GROUPS / groups.get("", "") / "memory.events"
    yield CONTROL_GROUPS / "memory.events"


@functools.cache
def gpus_here() -> dict[str, str]:
    """The GPUs this process may use: id -> model.

    torch is asked in a process of its own, since neither this one nor the fork server may touch CUDA.
    """
    if not Path("/dev/nvidiactl").exists() and not Path("/dev/dxg").exists():
        return {}
    question = (
        "import json, torch; n = torch.cuda.device_count(); "
        "print(json.dumps([torch.cuda.get_device_name(i) for i in range(n)]))"
    )
    answer = subprocess.run([sys.executable, "-P", "-c", question], capture_output=True, text=True, check=False)
    names = json.loads(answer.stdout) if answer.returncode == 0 else []
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    ids = [gpu.strip() for gpu in listed.split(",")] if listed else [str(i) for i in range(len(names))]
    return dict(zip(ids, names, strict=False))


async def host_and_gpus() -> tuple[str, tuple[str, ...]]:
    """The host's name and the GPUs that this process may use; the driver has Dask's workers run this."""
    return socket.gethostname(), tuple(await asyncio.to_thread(gpus_here))
