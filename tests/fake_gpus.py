"""GPUs for tests: a library in place of the driver's, and Dask workers that take themselves to have these GPUs."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from distributed import Client

from flytekitplugins.daskpytorch.rank import nvml
from processes import PRELOAD, dask_cluster, nothing_left_behind

SOUND = {
    "is": 1,
    "ecc": 0,
    "remap_pending": 0,
    "remap_failed": 0,
    "retiring": 0,
    "recovery": 0,
    "fabric": 3,
    "fabric_status": 0,
    "slowdowns": 0x1,  # idle
    "used": 600 << 20,
    "total": 80 << 30,
    "bus": 0x3B,
}
"""Answers of NVML about a GPU without faults."""
PRETEND = """
import os
from flytekitplugins.daskpytorch.node import hardware as node

here = dict(gpu.split("=") for gpu in os.environ["PRETENDED_GPUS"].split())
node.gpus_here = lambda: node.FoundGpus(dict.fromkeys(here, "pretended"), tuple(here.values()))
"""


def build(folder: Path) -> Path:
    """Compile the library, and return its path. Skip the test without a compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("this machine has no C compiler (gcc, cc), which makes the library in place of NVML")
    library = folder / "libnvidia-ml.so.1"
    source = Path(__file__).with_name("fake_nvml.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-Wall", "-o", library, source], check=True)
    return library


def install(folder: Path, patch: pytest.MonkeyPatch, gpus: Mapping[str, Mapping[str, int]]) -> Path:
    """Have this process use a library in place of NVML, with these answers. Return the file with the answers."""
    patch.setattr(nvml, "LIBRARY", str(build(folder)))
    patch.setenv("FAKE_NVML", str(folder / "gpus"))
    describe(folder / "gpus", gpus)
    return folder / "gpus"


def describe(file: Path, gpus: Mapping[str, Mapping[str, int]]) -> None:
    """Write what NVML answers about each GPU from now on."""
    lines = [f"{uuid} {key} {value}\n" for uuid, values in gpus.items() for key, value in values.items()]
    new = file.with_suffix(".new")
    new.write_text("".join(lines))
    new.replace(file)


@contextlib.contextmanager
def workers_with_gpus(folder: Path, file: Path, gpus: Sequence[Mapping[str, str]]) -> Iterator[Client]:
    """Start a cluster with a worker for each mapping of GPUs, from each GPU's index to its UUID.

    The workers' library in place of NVML reads `file`.
    """
    (folder / "pretend.py").write_text(PRETEND)
    shared = {
        "DASK_DISTRIBUTED__WORKER__PRELOAD": repr([PRELOAD, str(folder / "pretend.py")]),
        "LD_LIBRARY_PATH": str(build(folder).parent),
        "FAKE_NVML": str(file),
    }
    environments = {
        index: {**shared, "PRETENDED_GPUS": " ".join(f"{gpu}={uuid}" for gpu, uuid in here.items())}
        for index, here in enumerate(gpus)
    }
    with (
        nothing_left_behind(),
        # Python's loader reads LD_LIBRARY_PATH as a process starts.
        dask_cluster(folder, len(gpus), worker_environments=environments, is_warm=False) as cluster,
        Client(cluster.address) as client,
    ):
        yield client
