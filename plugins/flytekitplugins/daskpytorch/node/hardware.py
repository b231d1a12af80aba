"""What a worker's node has to offer: cores, GPUs, its way to the driver, versions. Runs on the workers."""

import asyncio
import contextlib
import functools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import psutil

from flytekitplugins.daskpytorch.errors import GangStartError
from flytekitplugins.daskpytorch.protocol.placement import Node

CONTROL_GROUPS = Path("/sys/fs/cgroup")
DRIVER_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""Devices, one of which a machine or container with GPUs has."""
LOOK_TIMEOUT = 60.0
"""Seconds for torch to be imported and to count the GPUs; a broken driver may never answer."""
DRIVER_TIMEOUT = 10.0
"""Seconds for nvidia-smi to answer."""
QUESTION = """
import json, torch
found, problem = [], ""
try:
    torch.cuda.init()
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append([properties.name, str(getattr(properties, "uuid", ""))])
except Exception as error:
    problem = f"{type(error).__name__}: {error}"
print(json.dumps([found, problem]))
"""
"""Program whose last line of output is the GPUs' names and UUIDs, and torch's error."""
ASKING_VARIABLES = ("NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""Variables that list GPUs: of a container by Kubernetes' device plugin, and of a process by its user."""
NO_LIST = ("all", "none", "void")
"""Values of `NVIDIA_VISIBLE_DEVICES` that name no GPU."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FoundGpus:
    """GPUs that this process may use."""

    names: dict[str, str] = field(default_factory=dict)
    """Model of each GPU, by the GPU's name in `CUDA_VISIBLE_DEVICES`, in the order of that variable."""
    uuids: tuple[str, ...] = ()
    """UUID of each GPU, or "" where unknown; of a MIG instance its own."""
    problem: str = ""
    """Why the look found no GPU, or ended early; empty after a good look."""


def describe_node(worker: str, interface: str | None, num_gpus: int = 0) -> Node:
    """Return what this node has to offer.

    Args:
        worker: The worker's address.
        interface: The network interface that reaches the driver.
        num_gpus: GPUs that the worker's limits ask for; 0 where nobody knows.

    Raises:
        GangStartError: This node has fewer GPUs than were asked for.
    """
    from dask.system import cpu_count  # knows the limits of containers; outside Dask's workers it takes 0.3 s to import

    gpus = require_gpus(num_gpus, worker)
    return Node(
        worker=worker,
        host=socket.gethostname(),
        num_cores=cpu_count(),
        gpus=tuple(gpus.names),
        gpu_names=tuple(gpus.names.values()),
        gpu_uuids=gpus.uuids,
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


def gpus_here() -> FoundGpus:
    """Return the GPUs that this process may use. A good look is taken once."""
    if not any(file.exists() for file in DRIVER_FILES):
        return FoundGpus(problem=f"there is no {DRIVER_FILES[0]}, so no GPU driver reaches this process")
    try:
        return _look()
    except _LookError as error:
        _logger.warning("GPUs could not be counted on host %s: %s", socket.gethostname(), error)
        return FoundGpus(problem=str(error))


class _LookError(Exception):
    """Torch did not answer, or found no GPU that works."""


@functools.cache  # which keeps no failure: a driver may recover
def _look() -> FoundGpus:
    """Ask torch in a process of its own, since neither this one nor the fork server may touch CUDA."""
    exitcode, said = _ask([sys.executable, "-P", "-c", QUESTION], LOOK_TIMEOUT)
    if exitcode is None:
        raise _LookError(f"torch did not count the GPUs within {LOOK_TIMEOUT:g} s; the GPU driver may hang")
    if exitcode != 0:
        raise _LookError(f"torch could not count the GPUs (exit code {exitcode}): {said[-1000:]}")
    found, problem = json.loads(said.rpartition("\n")[2])
    if problem:
        raise _LookError(f"torch says: {problem}")
    listed = _listed("CUDA_VISIBLE_DEVICES")
    instances = [gpu for gpu in _listed("NVIDIA_VISIBLE_DEVICES") if gpu.startswith("MIG-")]
    if found and not listed and len(instances) > len(found):  # CUDA shows one MIG instance to a process
        listed, found = instances, [found[0]] * len(instances)
    ids = listed or [str(index) for index in range(len(found))]
    instances = instances if len(instances) == len(found) and not os.environ.get("CUDA_VISIBLE_DEVICES") else ids
    uuids = [here if here.startswith("MIG-") else uuid for (_, uuid), here in zip(found, instances, strict=False)]
    return FoundGpus(dict(zip(ids, (name for name, _ in found), strict=False)), tuple(uuids))


def require_gpus(num_gpus: int, worker: str) -> FoundGpus:
    """Return this node's GPUs; fewer than were asked for are an error of infrastructure.

    Args:
        num_gpus: GPUs that the limits of the worker or task ask for; 0 where nobody knows. The variables that name
            the GPUs of a container or process count, too.
        worker: The worker's address, for the error.

    Raises:
        GangStartError: Fewer were found. The message has what torch and the driver said.
    """
    found = gpus_here()
    asked = {"the limits": num_gpus}
    for variable in ASKING_VARIABLES:
        # On a machine without a driver, CUDA_VISIBLE_DEVICES means nothing.
        if variable == "NVIDIA_VISIBLE_DEVICES" or any(file.exists() for file in DRIVER_FILES):
            asked[variable] = len(_listed(variable))
    if "CUDA_VISIBLE_DEVICES" in os.environ and not num_gpus:  # a process may be given a part of its container's
        asked["NVIDIA_VISIBLE_DEVICES"] = 0
    by, wanted = max(asked.items(), key=lambda item: item[1])
    if wanted <= len(found.names):
        return found
    names = f" ({', '.join(f'GPU {gpu}: {name}' for gpu, name in found.names.items())})" if found.names else ""
    variables = ", ".join(f"{variable}={os.environ.get(variable)!r}" for variable in ASKING_VARIABLES)
    problem = found.problem or "torch sees no others"
    raise GangStartError(
        f"GPUs are missing on host {socket.gethostname()} (worker {worker}): {by} ask{'s' * (by != 'the limits')} for "
        f"{wanted}, {len(found.names)} found{names}. {problem[0].upper()}{problem[1:]}. {_driver_says()} {variables}. "
        "Another attempt may get another node. Drain this one if nvidia-smi fails there.",
        worker=worker,
        host=socket.gethostname(),
    )


def _driver_says() -> str:
    try:
        exitcode, said = _ask(["nvidia-smi", "-L"], DRIVER_TIMEOUT)
    except OSError as error:
        return f"nvidia-smi cannot be run ({error})."
    if exitcode is None:
        return f"nvidia-smi did not answer within {DRIVER_TIMEOUT:g} s."
    return f"nvidia-smi says (exit code {exitcode}): {said[-1000:] or 'nothing'}."


def _listed(variable: str) -> list[str]:
    """Return the GPUs that a variable names. As CUDA reads it, the list ends at -1 or at an empty name."""
    listed: list[str] = []
    for gpu in map(str.strip, os.environ.get(variable, "").split(",")):
        if gpu in ("", "-1", *NO_LIST):
            break
        listed.append(gpu)
    return listed


def _ask(command: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """Run a command; return its exit code (None: it did not end in time), and its output and errors.

    A process that hangs in a driver cannot be killed, so nobody waits for its end.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=1.0)
        return None, ""
    return process.returncode, "\n".join(text.strip() for text in (errors, output) if text.strip())


async def host_and_gpus() -> tuple[str, tuple[str, ...]]:
    """Return the host's name and what tells this process's GPUs from others; the driver has workers run this."""
    found = await asyncio.to_thread(gpus_here)
    uuids = found.uuids or ("",) * len(found.names)
    return socket.gethostname(), tuple(uuid or gpu for uuid, gpu in zip(uuids, found.names, strict=True))
