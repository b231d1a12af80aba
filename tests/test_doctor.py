"""What the doctor makes of what it sees."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from importlib.metadata import distribution, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from flytekitplugins.daskpytorch import __main__, doctor
from flytekitplugins.daskpytorch.doctor import Finding

HERE: dict[str, str | None] = {
    "python": "3.11.2.final.0",
    "torch": "2.9.0",
    "flytekitplugins-daskpytorch": "0.1.0",
    "dask": "2026.8.0",
    "distributed": "2026.8.0",
    "cloudpickle": "3.1.2",
}
WORKERS = ("tcp://10.0.0.1:4000", "tcp://10.0.0.2:4000")


# ---- Versions


def test_what_is_installed_in_a_version_that_will_do_is_fine() -> None:
    assert doctor.examine_requirement(Requirement("torch>=2")) == Finding(what="torch", value=version("torch"))


def test_an_old_version_is_a_problem() -> None:
    finding = doctor.examine_requirement(Requirement("torch>=999"))
    assert (finding.value, finding.verdict) == (f"{version('torch')}, which is not >=999", "problem")
    assert "pip install 'torch>=999'" in finding.advice


def test_a_missing_package_is_a_problem() -> None:
    finding = doctor.examine_requirement(Requirement("no-such-distribution>=1"))
    assert (finding.value, finding.verdict) == ("not installed", "problem")


def test_equal_versions_take_one_line() -> None:
    workers = {worker: {**HERE, "python": "3.11.9.final.0"} for worker in WORKERS}
    without_torch = {**HERE, "torch": None}
    [finding] = doctor.compare_versions(HERE, without_torch, workers)
    assert (finding.value, finding.verdict) == ("those of the scheduler and of all workers are as here", "ok")


@pytest.mark.parametrize(
    ("package", "theirs", "verdict"),
    [
        ("torch", "2.8.0", "problem"),
        ("python", "3.12.1.final.0", "problem"),
        ("flytekitplugins-daskpytorch", None, "problem"),
        ("distributed", "2026.1.0", "warning"),
        ("cloudpickle", "3.0.0", "warning"),
    ],
)
def test_a_worker_that_differs_is_named(package: str, theirs: str | None, verdict: str) -> None:
    [finding] = doctor.compare_versions(HERE, HERE, {WORKERS[0]: HERE, WORKERS[1]: {**HERE, package: theirs}})
    assert (finding.what, finding.verdict) == (f"{package} on the cluster", verdict)
    assert f"on {WORKERS[1]};" in finding.value
    assert WORKERS[0] not in finding.value


def test_a_scheduler_without_this_package_is_a_problem() -> None:
    scheduler = {**HERE, "flytekitplugins-daskpytorch": None}
    [finding] = doctor.compare_versions(HERE, scheduler, {WORKERS[0]: HERE})
    assert (finding.value, finding.verdict) == ("missing on the scheduler; 0.1.0 here", "problem")


def test_of_many_workers_the_first_are_named() -> None:
    workers = {f"tcp://10.0.0.{host}:4000": {**HERE, "torch": "2.8.0"} for host in range(1, 31)}
    [finding] = doctor.compare_versions(HERE, HERE, workers)
    assert "tcp://10.0.0.4:4000 and 26 more; 2.9.0 here" in finding.value


# ---- GPUs


def test_gpus_are_listed_with_their_memory() -> None:
    answer = {"cuda": "13.0", "nccl": "2.27.5", "gpus": [["NVIDIA H200", 150_000_000_000], ["NVIDIA L4", 24 * 2**30]]}
    finding = doctor.judge_gpus(answer, has_driver=True)
    assert finding.value == "0: NVIDIA H200, 140 GiB; 1: NVIDIA L4, 24 GiB (CUDA 13.0, NCCL 2.27.5)"
    assert finding.verdict == "ok"


def test_a_machine_without_gpus_is_fine() -> None:
    assert doctor.judge_gpus({"cuda": None, "nccl": False, "gpus": []}, has_driver=False).verdict == "ok"


def test_a_driver_whose_gpus_torch_does_not_find_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    finding = doctor.judge_gpus({"cuda": "13.0", "nccl": "2.27.5", "gpus": []}, has_driver=True)
    assert finding.verdict == "warning"
    assert "CUDA_VISIBLE_DEVICES=''" in finding.advice


def test_gpus_without_nccl_are_a_warning() -> None:
    answer = {"cuda": "13.0", "nccl": False, "gpus": [["NVIDIA L4", 24 * 2**30]]}
    assert doctor.judge_gpus(answer, has_driver=True).verdict == "warning"


# ---- The commands that the backend starts


@pytest.fixture
def mine() -> set[Path]:
    files = distribution("flytekitplugins-daskpytorch").files or []
    return {Path(str(file.locate())).resolve() for file in files}


def test_the_command_of_this_package_is_fine(mine: set[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert doctor.examine_command("dask-worker", mine).verdict == "ok"


def test_a_command_that_is_not_on_path_is_a_warning(mine: set[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    finding = doctor.examine_command("dask-worker", mine)
    assert finding.verdict == "warning"
    assert "not on PATH" in finding.value
    assert f"put {Path(sys.executable).parent} first on PATH" in finding.advice


def test_another_ones_command_is_a_warning(mine: set[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "dask-worker"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{Path(sys.executable).parent}")
    finding = doctor.examine_command("dask-worker", mine)
    assert (finding.value, finding.verdict) == (f"{other}, not of this package", "warning")


def test_a_command_that_nobody_installed_is_a_problem(mine: set[Path]) -> None:
    assert doctor.examine_command("dask-no-such-command", mine).verdict == "problem"


# ---- Where ranks meet


def test_workers_elsewhere_cannot_reach_a_loopback_address() -> None:
    finding = doctor.meeting_point("meeting point", "127.0.0.1", ["127.0.0.2", "198.51.100.7"])
    assert finding.verdict == "problem"
    assert finding.value == "127.0.0.1 (interface lo), which the workers on 198.51.100.7 cannot reach"


def test_workers_on_this_machine_can() -> None:
    finding = doctor.meeting_point("meeting point", "127.0.0.1", ["127.0.0.2"])
    assert (finding.value, finding.verdict) == ("127.0.0.1 (interface lo)", "ok")


# ---- Nothing stops the examination


def test_a_check_that_breaks_is_a_problem_of_its_own() -> None:
    def check() -> Iterator[Finding]:
        yield Finding(what="first", value="fine")
        raise OSError("the disk is gone")

    first, second = doctor.surviving("disk", check)
    assert first.verdict == "ok"
    assert (second.what, second.value, second.verdict) == ("disk", "OSError: the disk is gone", "problem")


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:9", "nonsense://there"])
def test_an_address_without_a_scheduler_is_a_problem(address: str) -> None:
    [finding] = doctor.examine_cluster(address, timeout=0.5)
    assert (finding.what, finding.verdict) == ("scheduler", "problem")
    assert f"no answer from {address}" in finding.value


def test_a_scheduler_that_never_answers_is_a_problem() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        [finding] = doctor.examine_cluster(f"tcp://127.0.0.1:{silent.getsockname()[1]}", timeout=0.5)
    assert (finding.what, finding.verdict) == ("scheduler", "problem")
    assert "says nothing for 0.5 s" in finding.value


# ---- The command


def test_problems_make_the_exit_code_1_and_their_lines_say_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", "tcp://127.0.0.1:9")
    assert __main__.main(["--no-gang", "--timeout", "0.5"]) == 1
    text = capsys.readouterr().out
    assert f"\nok       torch                        {version('torch')}" in text
    assert "\nproblem  GPUs                         ImportError: libcudart.so.13: cannot open" in text
    assert "install it anew" in text
    assert "\nproblem  scheduler                    no answer from tcp://127.0.0.1:9" in text
    assert "pod's log" in text


@pytest.mark.parametrize("seconds", ["0", "-1", "inf", "soon"])
def test_the_time_limit_must_be_one(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        __main__.main(["--timeout", seconds])
    assert "--timeout" in capsys.readouterr().err
