"""A rank's environment has the right variables."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch  # noqa: F401 - as in a fork server

from flytekitplugins.daskpytorch.process.system import NANNYS_SETTINGS, needs_fresh_interpreter
from flytekitplugins.daskpytorch.protocol.job import Job, environment
from flytekitplugins.daskpytorch.protocol.placement import Node, place_ranks
from flytekitplugins.daskpytorch.settings import Gang
from gangs import JOB, order_for

NODE = Node(worker="w", host="h", num_cores=8, gpus=(), gpu_names=(), interface="lo", versions={})
WITH_GPUS = replace(NODE, gpus=("4", "5", "6"))


def variables(
    base: dict[str, str],
    node: Node = NODE,
    local_rank: int = 0,
    interface: str | None = None,
    devices: Literal["own", "all"] = "own",
    **given: Any,
) -> dict[str, str]:
    job = Job(**JOB | {"settings": Gang(devices=devices)} | given)
    [here] = place_ranks([node], 2, job.settings.devices)
    return environment(base, here[local_rank], job, interface, Path("/scratch"))


NANNYS = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
NANNYS["MALLOC_TRIM_THRESHOLD_"] = "65536"


def test_a_rank_has_its_share_of_the_cores_whatever_dask_gives_its_workers() -> None:
    found = variables(NANNYS | {"MKL_NUM_THREADS": "3"})
    assert (found["OMP_NUM_THREADS"], found["MKL_NUM_THREADS"]) == ("4", "3")
    assert not found.keys() & NANNYS.keys() - {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}
    assert variables({"OMP_NUM_THREADS": "1"})["OMP_NUM_THREADS"] == "1"  # no nanny has been here


def test_amds_variable_names_the_ranks_gpu_where_it_is_set() -> None:
    assert "HIP_VISIBLE_DEVICES" not in variables({}, WITH_GPUS)
    assert variables({"HIP_VISIBLE_DEVICES": "4,5,6"}, WITH_GPUS, local_rank=1)["HIP_VISIBLE_DEVICES"] == "5"
    assert variables({"HIP_VISIBLE_DEVICES": "-1"})["HIP_VISIBLE_DEVICES"] == "-1"


def test_threads_that_the_task_asks_for_win() -> None:
    found = variables({"OMP_NUM_THREADS": "1"}, environment={"OMP_NUM_THREADS": "3", "RANK": "9"})
    assert (found["OMP_NUM_THREADS"], found["RANK"]) == ("3", "0")


@pytest.mark.parametrize(
    ("node", "devices", "local_rank", "seen"),
    [
        (NODE, "own", 1, ("", "1")),
        (NODE, "all", 1, ("", "1")),
        (WITH_GPUS, "own", 0, ("4", "0")),
        (WITH_GPUS, "own", 1, ("5", "0")),
        (WITH_GPUS, "all", 0, ("4,5,6", "0")),
        (WITH_GPUS, "all", 1, ("4,5,6", "1")),
    ],
)
def test_local_rank_is_the_number_of_the_ranks_gpu(
    node: Node, devices: str, local_rank: int, seen: tuple[str, str]
) -> None:
    found = variables({"CUDA_VISIBLE_DEVICES": "4,5,6"}, node, local_rank, devices=devices)
    assert (found["CUDA_VISIBLE_DEVICES"], found["LOCAL_RANK"]) == seen
    assert (found["NODE_LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == (str(local_rank), "2")


def test_both_libraries_take_the_interface_that_reaches_the_driver_unless_the_user_knows_better() -> None:
    found = variables({"NCCL_SOCKET_IFNAME": "ib0"}, interface="eth0")
    assert (found["GLOO_SOCKET_IFNAME"], found["NCCL_SOCKET_IFNAME"]) == ("eth0", "ib0")
    assert variables({}, interface="eth0")["NCCL_SOCKET_IFNAME"] == "eth0"


def test_the_flight_recorder_remembers_what_is_asked_of_it_unless_the_user_wants_more() -> None:
    assert variables({})["TORCH_FR_BUFFER_SIZE"] == "64"
    assert variables({"TORCH_FR_BUFFER_SIZE": "9"})["TORCH_FR_BUFFER_SIZE"] == "9"
    assert "TORCH_FR_BUFFER_SIZE" not in variables({"TORCH_NCCL_TRACE_BUFFER_SIZE": "9"})


@pytest.mark.parametrize(("setting", "pulse"), [(None, None), ("auto", 10.0), (300.0, 1.0), (2.0, 0.4)])
def test_ranks_report_often_enough_for_what_is_asked(setting: float | str | None, pulse: float | None) -> None:
    assert order_for(Gang(hang_timeout=setting)).job.pulse == pulse


# ---- Variables that a forked rank would get too late cost a gang fresh interpreters, and no others


EARLY = (
    *("PYTHONHASHSEED", "PYTHONMALLOC", "LD_PRELOAD", "MALLOC_ARENA_MAX", "TORCH_LOGS", "TORCH_TRACE", "PYTORCH_JIT"),
    *("TORCH_DISTRIBUTED_DEBUG", "TORCH_CPP_LOG_LEVEL", "TORCH_SHOW_CPP_STACKTRACES", "OMP_SCHEDULE", "OMP_PROC_BIND"),
    *("GOMP_CPU_AFFINITY", "MKL_VERBOSE", "OPENBLAS_NUM_THREADS", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
)
LATE = (
    *("DATA", "RANK", "NCCL_DEBUG", "TORCH_NCCL_BLOCKING_WAIT", "TORCH_FR_BUFFER_SIZE", "GLOO_SOCKET_IFNAME"),
    *("CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", "OMP_NUM_THREADS", "MKL_NUM_THREADS"),
    *("PYTHONPATH", "PYTHONUNBUFFERED", "LD_LIBRARY_PATH", "KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR", "TMPDIR"),
)


@pytest.mark.parametrize(("name", "is_early"), [*((name, True) for name in EARLY), *((name, False) for name in LATE)])
def test_variables_that_are_read_early_need_fresh_interpreters(name: str, *, is_early: bool) -> None:
    given = {"HOME": "/", name: "3"}
    for started, wanted in (({"HOME": "/"}, given), (given, {"HOME": "/"}), ({name: "2"}, given)):
        assert needs_fresh_interpreter(started, wanted) is is_early
    assert not needs_fresh_interpreter(given, given | {"RANK": "1"})


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_of_the_allocators_options_only_its_backend_is_read_early(name: str) -> None:
    segments = {name: "expandable_segments:True"}
    other = {name: "expandable_segments:True,backend:cudaMallocAsync"}
    assert not needs_fresh_interpreter({}, segments)
    assert needs_fresh_interpreter(segments, other)
    assert not needs_fresh_interpreter(other, {name: "backend:cudaMallocAsync"})


def test_what_a_nanny_has_set_costs_nothing_and_what_the_user_has_set_counts() -> None:
    assert not needs_fresh_interpreter(NANNYS_SETTINGS, {"OMP_NUM_THREADS": "4"})
    assert needs_fresh_interpreter({}, {"OPENBLAS_NUM_THREADS": "1"})
    assert needs_fresh_interpreter(NANNYS_SETTINGS, {"OPENBLAS_NUM_THREADS": "2"})
