"""The doctor on a real cluster: no problem, a worker with another torch, busy workers."""

import json
import os
import re
import sys
import time
from pathlib import Path

import pytest
from distributed import Client

from flytekitplugins.daskpytorch import GangStartError, doctor
from processes import Cluster, nothing_left_behind, run_program, start_worker, until, wait_for_workers


def test_all_is_well(cluster: Cluster, tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with nothing_left_behind():
        command = ["-m", "flytekitplugins.daskpytorch", "doctor", "--scheduler", cluster.address, "--json"]
        done = run_program(command, cwd=tmp_path, env={"PATH": path})
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert {line["verdict"] for line in lines} == {"ok"}
    found = {line["what"]: line["text"] for line in lines}
    assert found["GPUs"] == "none; ranks train on the CPU" or found["GPUs"].startswith("0: ")
    for where in ("on this node", "on the cluster"):
        assert re.match(r"2 on .* have met this process at 127\.0\.0\.1 \(lo\) and summed in ", found[f"ranks {where}"])


def test_busy_workers_keep_the_ranks_from_meeting_but_not_the_doctor_from_saying_so(
    cluster: Cluster, client: Client, tmp_path: Path
) -> None:
    def work(name: str) -> None:  # in here, so that it travels by value
        (tmp_path / name).touch()
        while not free.exists():
            time.sleep(0.01)

    free = tmp_path / "free"
    busy = client.map(work, ["busy-0", "busy-1"], pure=False)
    try:
        until(lambda: len(list(tmp_path.glob("busy-*"))) == 2, "the work, which agents would overtake in the queue")
        with pytest.raises(GangStartError, match="only 0 of 2 workers started"):
            doctor.try_cluster(cluster.address, 4.0)
    finally:
        free.touch()
    client.gather(busy)


def test_a_worker_with_another_torch_is_named(cluster: Cluster, tmp_path: Path) -> None:
    other = tmp_path / "site" / "torch-0.0.1.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 0.0.1\n")
    end_worker = start_worker(cluster.address, 2, tmp_path, {"PYTHONPATH": str(other.parent)})
    try:
        wait_for_workers(cluster.address, 3)
        with pytest.raises(ValueError, match=r"has torch 0\.0\.1, this process"):
            doctor.try_cluster(cluster.address, 60.0)
    finally:
        end_worker()
