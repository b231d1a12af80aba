"""`benchmarks/gpu.py` names what is missing, outlives checks that hang, and leaves its report however it ends."""

from __future__ import annotations

import ensurepip
import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "benchmarks"))  # they import each other as scripts do

import gpu
import gpu_wheels
from gpu import Report

from processes import MARK, marked, until

COMMAND = [sys.executable, str(REPOSITORY / "benchmarks" / "gpu.py")]


def written(folder: Path) -> dict[str, Any]:
    file = folder / "gpu.json"
    return json.loads(file.read_text()) if file.exists() else {"about": {}, "results": []}


def outcomes(folder: Path) -> dict[str, str]:
    return {result["what"]: result["outcome"] for result in written(folder)["results"]}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--to", "gpu.txt"], "--to gpu.txt: must end in .md"),
        (["--to", "nowhere/gpu.md"], "lie in a folder that is there"),
        (["--part", "check"], "invalid choice: 'check'"),
    ],
)
def test_wrong_options_are_refused_at_once(options: list[str], said: str, tmp_path: Path) -> None:
    ran = subprocess.run([*COMMAND, *options], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode == 2
    assert said in ran.stderr
    assert not [*tmp_path.iterdir()]


def test_what_a_part_lacks_is_named_before_any_part_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "CHECKS_NEED", ("torch", "no_such_module"))
    monkeypatch.setattr(gpu, "SPEED", {"a.py": ((), ())})
    monkeypatch.setattr(gpu, "OURS", ("torch", "no.such", "other_missing"))
    report = Report(tmp_path / "gpu.md")
    gpu.planned(report, "both")
    assert {what: (each.outcome, each.said.partition(":")[0]) for what, each in report.results.items()} == {
        "a.py": ("skipped", "needs no.such, other_missing"),
        "tests": ("skipped", "needs no_such_module"),
    }


CHECKS = """
import os
import signal
import time
import pytest

def test_passes(record_property):
    record_property("free bytes", 7)

@pytest.mark.skip(reason="needs a GPU: none here")
def test_is_skipped():
    pass

def test_is_wrong():
    assert 1 == 2, "one is not two"

def test_hangs():
    time.sleep(600)

def test_hangs_where_no_signal_comes_through():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    time.sleep(600)

def test_ends_the_process():
    os._exit(3)

def test_passes_at_last():
    pass
"""


@pytest.mark.slow
def test_a_check_that_hangs_or_ends_its_process_does_not_keep_the_others_from_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_made.py").write_text(CHECKS)
    for name, value in {"CHECKS": tmp_path / "test_made.py", "CHECK_LIMIT": 2.0, "FAREWELL": 3.0}.items():
        monkeypatch.setattr(gpu, name, value)
    report = Report(tmp_path / "gpu.md")
    report.about["GPUs"] = []
    gpu.checks(report, deadline=float("inf"))
    found = {what.removeprefix("test_"): (each.outcome, each.said) for what, each in report.results.items()}
    assert found.pop("passes") == ("passed", "")
    assert report.results["test_passes"].figures == {"free bytes": 7}
    assert found.pop("is_skipped") == ("skipped", "needs a GPU: none here")
    assert found.pop("passes_at_last") == ("passed", "")
    assert {outcome for outcome, _ in found.values()} == {"failed"}
    assert "one is not two" in found["is_wrong"][1]
    assert "Timeout" in found["hangs"][1]
    assert found["hangs_where_no_signal_comes_through"][1] == "not done in time"
    assert "exit code 3" in found["ends_the_process"][1]


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU")
def test_without_a_gpu_the_command_fails_at_once_if_cuda_is_required(tmp_path: Path) -> None:
    command = [*COMMAND, "--require-cuda", "--to", str(tmp_path / "gpu.md")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert ran.returncode == 1
    assert "finds no GPU, and /dev/nvidiactl is missing" in (tmp_path / "gpu.md").read_text()
    assert ran.stdout == (tmp_path / "gpu.md").read_text()
    assert outcomes(tmp_path) == {"environment": "failed"}


def test_after_sigterm_the_report_has_the_results_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK, mark := os.urandom(16).hex())
    command = [*COMMAND, "--part", "checks", "--to", str(tmp_path / "gpu.md")]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    until(lambda: "passed" in outcomes(tmp_path).values(), (tmp_path / "log").read_text)
    process.send_signal(signal.SIGTERM)
    assert process.wait(100) == 143
    assert {"passed", "not run"} <= set(outcomes(tmp_path).values())
    assert written(tmp_path)["about"]["ended"] == "stopped"
    until(lambda: not marked(mark), lambda: f"to end: {marked(mark)}")


# ---- Wheels


def make_wheel(folder: Path, name: str, **files: str) -> None:
    info = f"{name}-1.0.dist-info"
    files |= {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        for file, text in (files | {f"{info}/RECORD": record}).items():
            wheel.writestr(file, text)


def test_a_child_of_the_wheels_python_finds_their_packages_and_those_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the machine's settings constrain pip."""
    bundled = next(Path(ensurepip.__file__).parent.glob("_bundled/pip-*.whl"), None)
    if bundled is None:
        pytest.skip("this Python has no wheel of pip")
    wheels, venv = tmp_path / "wheels", tmp_path / "venv"
    wheels.mkdir()
    with pytest.raises(ValueError, match=r"lacks the wheels of pip or flytekitplugins_daskpytorch: .*--bundle"):
        gpu_wheels.python_with(wheels, venv)
    (wheels / bundled.name).write_bytes(bundled.read_bytes())
    make_wheel(wheels, gpu_wheels.PACKAGE, **{"made_here.py": "", "packaging.py": "of = 'wheels'"})
    (tmp_path / "constraints").write_text(f"{gpu_wheels.PACKAGE}==99")
    monkeypatch.setenv("PIP_CONSTRAINT", str(tmp_path / "constraints"))
    python = gpu_wheels.python_with(wheels, venv)
    program = "import made_here, packaging, torch; print(packaging.of, torch.__file__)"
    started = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {program!r}], check=True, env={{}})"
    ran = subprocess.run([python, "-c", started], capture_output=True, text=True, check=True, timeout=200)
    import torch

    assert ran.stdout.split() == ["wheels", torch.__file__]
    command = [python.parent / "torchrun", "--standalone", "--no-python", python, "-c", "import made_here"]
    assert subprocess.run(command, capture_output=True, check=False, timeout=200).returncode == 0
    before = (venv / "bin").stat().st_mtime_ns
    assert gpu_wheels.python_with(wheels, venv) == python
    assert (venv / "bin").stat().st_mtime_ns == before  # made once
