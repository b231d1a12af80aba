"""A rank's environment has the right variables."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from flytekitplugins.daskpytorch.protocol import start_variables
from flytekitplugins.daskpytorch.protocol.orders import Job, environment
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


def test_a_rank_has_its_share_of_the_cores_whatever_dask_gives_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_variables, "_at_start", lambda _: {})
    found = variables(NANNYS)
    assert found["OMP_NUM_THREADS"] == "4"
    assert not found.keys() & NANNYS.keys() - {"OMP_NUM_THREADS"}


def test_threads_that_the_user_has_set_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    assert variables({"OMP_NUM_THREADS": "1"})["OMP_NUM_THREADS"] == "1"  # no nanny has been here
    started_with = {os.getpid(): NANNYS, os.getppid(): {"OMP_NUM_THREADS": "1"}}
    monkeypatch.setattr(start_variables, "_at_start", started_with.__getitem__)
    found = variables(NANNYS | {"MKL_NUM_THREADS": "3"})
    assert (found["OMP_NUM_THREADS"], found["MKL_NUM_THREADS"]) == ("1", "3")
    assert "OPENBLAS_NUM_THREADS" not in found


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
