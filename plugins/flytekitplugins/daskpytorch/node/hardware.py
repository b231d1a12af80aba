"""Finds a node's resources: cores, GPUs, network interface and versions of packages. Runs on that node."""

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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import psutil

from flytekitplugins.daskpytorch.errors import GangStartError
from flytekitplugins.daskpytorch.protocol.placement import Node

CONTROL_GROUPS = Path("/sys/fs/cgroup")
DRIVER_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
AMD_DRIVER, AMD_DEVICES = Path("/dev/kfd"), Path("/sys/class/kfd/kfd/topology/nodes")
AMD_VARIABLES = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""Each hides GPUs from a process. HIP, for which torch's names say CUDA, reads the third where the first is missing."""
LOOK_TIMEOUT = 60.0
"""Seconds to import torch and count the GPUs. A broken GPU driver may never answer."""
QUESTION = """
import json, torch
found, problem = [], ""
try:
    torch.cuda.init()
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        key = str(getattr(about, "uuid", ""))
        if torch.version.hip:  # AMD's libraries disagree about UUIDs
            key = f"{about.pci_domain_id:04x}:{about.pci_bus_id:02x}:{about.pci_device_id:02x}.0"
        found.append([about.name, key])
except Exception as error:
    problem = f"{type(error).__name__}: {error}"
print(json.dumps([found, problem]))
"""
ASKING_VARIABLES = ("NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""Kubernetes' device plugin sets the first for a container, and users set the second for a process."""
NO_LIST = ("all", "none", "void")

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FoundGpus:
    names: dict[str, str] = field(default_factory=dict)
    uuids: tuple[str, ...] = ()
    problem: str = ""


def describe_node(worker: str, interface: str | None, num_gpus: int = 0) -> Node:
    """Return this node's resources.

    GangStartError: it has fewer GPUs than `num_gpus` (0: unknown), the worker's limit.
    """
    from dask.system import cpu_count  # respects containers' limits, and takes 0.3 s to import outside Dask's workers

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


@functools.cache  # the metadata takes 8 ms to read
def local_versions() -> dict[str, str]:
    packages = ("flytekitplugins-daskpytorch", "torch")
    return {"python": ".".join(map(str, sys.version_info[:2]))} | {name: version(name) for name in packages}


def check_versions(nodes: Iterable[Node]) -> None:
    mine = local_versions()
    differing = [
        f"{node.title} has {name} {theirs}, this process {mine.get(name)}"
        for node in nodes
        for name, theirs in node.versions.items()
        if theirs != mine.get(name)
    ]
    if differing:
        raise ValueError(
            f"driver and workers differ: {'; '.join(differing)}. Use one image for the task and its Dask cluster."
        )


def interface_of(address: str) -> str | None:
    if address.startswith("127."):
        return "lo"
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == address for entry in addresses):
            return name
    return None


def num_kills_for_memory() -> int:
    """Count processes of this control group that the kernel has killed for lack of memory, as far as known."""
    for file in _memory_records():
        with contextlib.suppress(OSError, ValueError):
            for line in file.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return 0


def _memory_records() -> Iterator[Path]:
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


def num_amd_gpus() -> int:
    """Count AMD GPUs that have cards of their own: those inside a processor, as in laptops, do not count."""
    if not os.access(AMD_DRIVER, os.R_OK | os.W_OK):
        return 0
    return sum(map(_is_card, AMD_DEVICES.glob("*/properties")))


def _is_card(properties: Path) -> bool:
    try:
        values = dict(map(str.split, properties.read_text().splitlines()))
    except OSError:  # the kernel refuses a container the properties of GPUs that it has not got (EPERM)
        return False
    return int(values["simd_count"]) > 0 and int(values["cpu_cores_count"]) == 0


def has_driver() -> bool:
    return num_amd_gpus() > 0 or any(file.exists() for file in DRIVER_FILES)


def gpus_here() -> FoundGpus:
    if not has_driver():
        return FoundGpus(problem=f"there is no {DRIVER_FILES[0]}, so no GPU driver reaches this process")
    try:
        return _look()
    except _LookError as error:
        _logger.warning(
            "GPUs could not be counted on host %s: %s. Ranks there get no GPU. Check the GPU driver, as by nvidia-smi",
            socket.gethostname(),
            error,
        )
        return FoundGpus(problem=str(error))


class _LookError(Exception):
    """Torch did not answer, or found no working GPU."""


@functools.cache  # the cache keeps no failure, as a GPU driver may recover
def _look() -> FoundGpus:
    """Count GPUs in a separate process, since this process and the fork server must not touch CUDA."""
    exitcode, said = _ask_torch()
    if exitcode is None:
        raise _LookError(
            f"torch did not count the GPUs within {LOOK_TIMEOUT:g} s; the GPU driver may hang: does nvidia-smi answer?"
        )
    if exitcode != 0:
        raise _LookError(f"torch could not count the GPUs (exit code {exitcode}): {said[-1000:]}")
    found, problem = json.loads(said.rpartition("\n")[2])
    if problem:
        raise _LookError(f"torch says: {problem}")
    listed = _listed("HIP_VISIBLE_DEVICES") if num_amd_gpus() else []
    listed = listed or _listed("CUDA_VISIBLE_DEVICES")
    instances = [gpu for gpu in _listed("NVIDIA_VISIBLE_DEVICES") if gpu.startswith("MIG-")]
    if found and not listed and len(instances) > len(found):  # CUDA shows only one MIG instance to a process
        listed, found = instances, [found[0]] * len(instances)
    ids = listed or [str(index) for index in range(len(found))]
    instances = instances if len(instances) == len(found) and not os.environ.get("CUDA_VISIBLE_DEVICES") else ids
    uuids = [here if here.startswith("MIG-") else uuid for (_, uuid), here in zip(found, instances, strict=False)]
    return FoundGpus(dict(zip(ids, (name for name, _ in found), strict=False)), tuple(uuids))


def require_gpus(num_gpus: int, worker: str) -> FoundGpus:
    """Return this node's GPUs. GangStartError, with the output of torch: fewer than were asked for.

    A longer list in `NVIDIA_VISIBLE_DEVICES` or `CUDA_VISIBLE_DEVICES` counts instead of the limit `num_gpus`.
    """
    found = gpus_here()
    are_hidden = any(variable in os.environ and not _listed(variable) for variable in AMD_VARIABLES)
    if not found.names and num_amd_gpus() and not are_hidden:
        raise _amd_without_torch(found.problem, worker)
    asked = {"the limits": num_gpus}
    for variable in ASKING_VARIABLES:
        # CUDA_VISIBLE_DEVICES has no meaning on a machine without a GPU driver.
        if variable == "NVIDIA_VISIBLE_DEVICES" or any(file.exists() for file in DRIVER_FILES):
            asked[variable] = len(_listed(variable))
    if "CUDA_VISIBLE_DEVICES" in os.environ and not num_gpus:  # a process may get only some of its container's GPUs
        asked["NVIDIA_VISIBLE_DEVICES"] = 0
    by, wanted = max(asked.items(), key=lambda item: item[1])
    if wanted <= len(found.names):
        return found
    variables = ", ".join(f"{variable}={os.environ.get(variable)!r}" for variable in ASKING_VARIABLES)
    problem = found.problem or "torch sees no others"
    raise GangStartError(
        f"GPUs are missing on host {socket.gethostname()} (worker {worker}): {by} ask{'s' * (by != 'the limits')} for "
        f"{wanted}, {len(found.names)} found{_in_words(found.names)}. {problem[0].upper()}{problem[1:]}. "
        f"{variables}. Another attempt may get another node. Drain this one if nvidia-smi fails there.",
        worker=worker,
        host=socket.gethostname(),
    )


def _amd_without_torch(problem: str, worker: str) -> GangStartError:
    host = socket.gethostname()
    return GangStartError(
        f"host {host} (worker {worker}) has {num_amd_gpus()} AMD GPUs, of which torch {version('torch')} finds none "
        f"({problem or 'without an error'}): the ranks would train on the CPU. Install torch's build for ROCm "
        "(https://pytorch.org/get-started/locally), or set HIP_VISIBLE_DEVICES=-1 for this worker to train on the CPU.",
        worker=worker,
        host=host,
    )


def num_ranks_here(nproc: int | str, backend: str, num_gpus: int = 0) -> int:
    """Return the number of ranks here for `SpawnDDP(nproc=...)`. "auto": one per GPU, or one without GPUs.

    GangStartError: GPUs of the limits are missing. ValueError: nccl has fewer GPUs than ranks.
    """
    gpus = require_gpus(num_gpus, socket.gethostname()).names
    wanted = int(nproc) if nproc != "auto" else max(1, len(gpus))
    if backend == "nccl" and wanted > len(gpus):
        raise ValueError(
            f"SpawnDDP(nproc={nproc!r}) with Gang(backend='nccl') needs a GPU of its own for each of {wanted} ranks; "
            f"torch finds {len(gpus)} on this node{_in_words(gpus)}. Ask for GPUs in the task's requests, lower nproc, "
            "or use backend='gloo', with which ranks may share a GPU or do without."
        )
    return wanted


def _in_words(gpus: dict[str, str]) -> str:
    return f" ({', '.join(f'GPU {gpu}: {name}' for gpu, name in gpus.items())})" if gpus else ""


def _listed(variable: str) -> list[str]:
    listed: list[str] = []
    for gpu in map(str.strip, os.environ.get(variable, "").split(",")):
        if gpu in ("", "-1", *NO_LIST):
            break
        listed.append(gpu)
    return listed


def _ask_torch() -> tuple[int | None, str]:
    """Return exit code and output, standard error first, or (None, "") after a timeout.

    A process that hangs in a GPU driver cannot be killed, so this function waits at most 1 s more for its end.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", QUESTION],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=LOOK_TIMEOUT)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=1.0)
        return None, ""
    return process.returncode, "\n".join(text.strip() for text in (errors, output) if text.strip())


async def host_and_gpus() -> tuple[str, tuple[str, ...]]:
    """Return the host's name and the GPUs' UUIDs (or names), on a worker."""
    found = await asyncio.to_thread(gpus_here)
    uuids = found.uuids or ("",) * len(found.names)
    return socket.gethostname(), tuple(uuid or gpu for uuid, gpu in zip(uuids, found.names, strict=True))
