"""Finds a node's resources: cores, GPUs, network interface and versions of packages. Runs on that node."""

import asyncio
import contextlib
import functools
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import psutil

from flytekitplugins.daskpytorch.errors import GangStartError
from flytekitplugins.daskpytorch.process import gpu_vendor
from flytekitplugins.daskpytorch.protocol.placement import Node

CONTROL_GROUPS = Path("/sys/fs/cgroup")
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
    group = ""
    with contextlib.suppress(OSError):
        _, _, group = Path("/proc/self/cgroup").read_text().rpartition("0::/")
    for folder in (CONTROL_GROUPS / group.strip(), CONTROL_GROUPS):
        with contextlib.suppress(OSError, ValueError):
            for line in (folder / "memory.events").read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return 0


def gpus_here() -> FoundGpus:
    if not gpu_vendor.has_driver():
        return FoundGpus(problem=f"there is no {gpu_vendor.NVIDIA_FILES[0]}, so no GPU driver reaches this process")
    try:
        return _look()
    except _LookError as error:
        _logger.warning(
            "GPUs could not be counted on host %s: %s. Ranks there get no GPU. Check the GPU driver, as by %s",
            socket.gethostname(),
            error,
            gpu_vendor.vendor_here().tool,
        )
        return FoundGpus(problem=str(error))


class _LookError(Exception):
    """Torch did not answer, or found no working GPU."""


@functools.cache  # the cache keeps no failure, as a GPU driver may recover
def _look() -> FoundGpus:
    """Count GPUs in a separate process, since this process and the fork server must not touch CUDA."""
    exitcode, said = _ask_torch()
    here = gpu_vendor.vendor_here()
    if exitcode is None:
        raise _LookError(
            f"torch did not count the GPUs within {LOOK_TIMEOUT:g} s; the GPU driver may hang: does {here.tool} answer?"
        )
    if exitcode != 0:
        raise _LookError(f"torch could not count the GPUs (exit code {exitcode}): {said[-1000:]}")
    found, problem = json.loads(said.rpartition("\n")[2])
    if problem:
        raise _LookError(f"torch says: {problem}")
    listed, instances = here.visible(), gpu_vendor.instances()
    if found and not listed and len(instances) > len(found):  # CUDA shows only one MIG instance to a process
        listed, found = instances, [found[0]] * len(instances)
    ids = listed or [str(index) for index in range(len(found))]
    mine = instances if len(instances) == len(found) and not os.environ.get(gpu_vendor.VISIBLE) else ids
    uuids = [gpu if gpu.startswith("MIG-") else uuid for (_, uuid), gpu in zip(found, mine, strict=False)]
    return FoundGpus(dict(zip(ids, (name for name, _ in found), strict=False)), tuple(uuids))


def require_gpus(num_gpus: int, worker: str) -> FoundGpus:
    """Return this node's GPUs. GangStartError, with the output of torch: fewer than were asked for.

    A longer list in `NVIDIA_VISIBLE_DEVICES` or `CUDA_VISIBLE_DEVICES` counts instead of the limit `num_gpus`.
    """
    found = gpus_here()
    if not found.names and gpu_vendor.num_amd_gpus() and not gpu_vendor.are_amd_gpus_hidden():
        raise _amd_without_torch(found.problem, worker)
    by, wanted = gpu_vendor.asked_for(num_gpus)
    if wanted <= len(found.names):
        return found
    variables = ", ".join(f"{variable}={os.environ.get(variable)!r}" for variable in gpu_vendor.ASKING_VARIABLES)
    problem = found.problem or "torch sees no others"
    raise GangStartError(
        f"GPUs are missing on host {socket.gethostname()} (worker {worker}): {by} ask{'s' * (by != 'the limits')} for "
        f"{wanted}, {len(found.names)} found{_in_words(found.names)}. {problem[0].upper()}{problem[1:]}. "
        f"{variables}. Another attempt may get another node. "
        f"Drain this one if {gpu_vendor.vendor_here().tool} fails there.",
        worker=worker,
        host=socket.gethostname(),
    )


def _amd_without_torch(problem: str, worker: str) -> GangStartError:
    host = socket.gethostname()
    return GangStartError(
        f"host {host} (worker {worker}) has {gpu_vendor.num_amd_gpus()} AMD GPUs, of which torch "
        f"{version('torch')} finds none ({problem or 'without an error'}): the ranks would train on the CPU. "
        "Install torch's build for ROCm (https://pytorch.org/get-started/locally), or set "
        "HIP_VISIBLE_DEVICES=-1 for this worker to train on the CPU.",
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


def _ask_torch() -> tuple[int | None, str]:
    """Return exit code and output, standard error first, or (None, "") after a timeout."""
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
        process.kill()  # without a wait: a process that hangs in a GPU driver cannot be killed
        return None, ""
    return process.returncode, "\n".join(text.strip() for text in (errors, output) if text.strip())


async def host_and_gpus() -> tuple[str, tuple[str, ...]]:
    """Return the host's name and the GPUs' UUIDs (or names), on a worker."""
    found = await asyncio.to_thread(gpus_here)
    return socket.gethostname(), tuple(uuid or gpu for uuid, gpu in zip(found.uuids, found.names, strict=True))
