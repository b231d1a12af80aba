"""GPUs for tests: a library in place of nvidia-ml-py, and Dask workers that take themselves to have these GPUs."""

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
from distributed import Client

from flytekitplugins.daskpytorch.process import gpu_vendor
from processes import PRELOAD, dask_cluster, nothing_left_behind

LIBRARY = Path(__file__).with_name("fake_nvml")
"""Folder with a module `pynvml` that answers as tests describe."""
SOUND = {"ecc": 0, "remap_pending": 0, "remap_failed": 0, "recovery": 0, "used": 600 << 20, "total": 80 << 30}
"""Answers of NVML about a GPU without faults."""
PRETEND = """
import os
from flytekitplugins.daskpytorch.node import hardware as node

here = dict(gpu.split("=") for gpu in os.environ["PRETENDED_GPUS"].split())
node.gpus_here = lambda: node.FoundGpus(dict.fromkeys(here, "pretended"), tuple(here.values()))
"""


def fake_library() -> ModuleType:
    """Return the library in place of nvidia-ml-py, imported anew."""
    spec = spec_from_file_location("pynvml", LIBRARY / "pynvml.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(library := module_from_spec(spec))
    return library


def install(folder: Path, patch: pytest.MonkeyPatch, gpus: Mapping[str, Mapping[str, int]]) -> Path:
    """Have this process use a library in place of nvidia-ml-py. Return the file with the answers."""
    patch.setitem(sys.modules, "pynvml", fake_library())
    gpu_vendor._begin_nvml.cache_clear()
    patch.setenv("FAKE_NVML", str(folder / "gpus"))
    describe(folder / "gpus", gpus)
    return folder / "gpus"


def describe(file: Path, gpus: Mapping[str, Mapping[str, int]]) -> None:
    """Write what NVML answers about each GPU, and about the driver itself ("*"), from now on."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps({"*": {}, **gpus}))
    new.replace(file)


@contextlib.contextmanager
def workers_with_gpus(folder: Path, file: Path, gpus: Sequence[Mapping[str, str]]) -> Iterator[Client]:
    """Start a cluster with a worker for each mapping of GPUs, from each GPU's index to its UUID.

    The workers' library in place of nvidia-ml-py reads `file`.
    """
    (folder / "pretend.py").write_text(PRETEND)
    shared = {
        "DASK_DISTRIBUTED__WORKER__PRELOAD": repr([PRELOAD, str(folder / "pretend.py")]),
        "PYTHONPATH": str(LIBRARY),
        "FAKE_NVML": str(file),
    }
    environments = {
        index: {**shared, "PRETENDED_GPUS": " ".join(f"{gpu}={uuid}" for gpu, uuid in here.items())}
        for index, here in enumerate(gpus)
    }
    with (
        nothing_left_behind(),
        dask_cluster(folder, len(gpus), worker_environments=environments, is_warm=False) as cluster,
        Client(cluster.address) as client,
    ):
        yield client
