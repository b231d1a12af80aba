"""`benchmarks/gpu.py` names what is missing, outlives checks that hang, and leaves its report however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "benchmarks"))  # they import each other as scripts do


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
