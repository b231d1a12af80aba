"""The fork server starts early only if the process will run a gang, with either of Flyte's SDKs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from flytekitplugins.daskpytorch.task.process import is_worthwhile
from flyteplugins.daskpytorch.command_line import HERE
from processes import SCRIPTS, nothing_left_behind

TRAINING = "from flytekit import task\nfrom flytekitplugins.daskpytorch import DaskDDP\n"
OTHER = "from flytekit import task\n"


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("training.py").write_text(TRAINING)
    Path("other.py").write_text(OTHER)


WORTH_IT = {
    "pyflyte": [
        "/usr/bin/pyflyte run training.py train",
        "pyflyte run training.py train --file other.py",
        "pyflyte -v run --copy auto ./training.py train --steps 3",
    ],
    "flyte": [
        "/usr/bin/flyte run --local training.py train",
        "flyte -v run --tracked ./training.py train --steps 3",
    ],
}
NOT_WORTH_IT = {
    "pyflyte": [
        "pyflyte run other.py train --file training.py",
        *(f"pyflyte run {rest}" for rest in ("--remote training.py train", "-r training.py train", "training.py", "")),
        *(f"pyflyte run {rest}" for rest in ("training.py train --help", "nowhere.py train")),
        "pyflyte register training.py run",
        "pyflyte-execute run training.py train",
        "python training.py run training.py train",
        "",
    ],
    "flyte": [
        *(f"flyte run {rest}" for rest in ("training.py train", "training.py train --local")),
        *(f"flyte run --local {rest}" for rest in ("other.py train", "training.py train --help", "training.py")),
        "flyte deploy --local training.py run",
        "pyflyte run --local training.py train",
    ],
}


@pytest.mark.parametrize("program", ["pyflyte", "flyte"])
def test_a_local_run_of_a_file_that_names_the_package_is_worth_it_and_nothing_else(program: str) -> None:
    here = {"here": HERE} if program == "flyte" else {}
    for line in WORTH_IT[program]:
        assert is_worthwhile(line.split(), program, **here), line
    for line in NOT_WORTH_IT[program]:
        assert not is_worthwhile(line.split(), program, **here), line


LOOK = """
import psutil

for child in psutil.Process().children():
    print("at import:", child.cmdline())
"""
DOUBLE = """
def double(x: int) -> int:
    return 2 * x
"""
OF_FLYTE_2 = """
import flyteplugins.daskpytorch
import flyte
env = flyte.TaskEnvironment("plain")
"""


@pytest.mark.parametrize(
    ("program", "run"),
    [("pyflyte", ("run",)), pytest.param("flyte", ("run", "--local"), marks=pytest.mark.slow)],
)
def test_it_runs_before_the_file_is_imported_and_is_ended_unused(program: str, run: tuple[str, ...]) -> None:
    if program == "flyte":
        pytest.importorskip("flyteplugins.dask")
        Path("file.py").write_text(OF_FLYTE_2 + LOOK + "\n@env.task" + DOUBLE)
    else:
        Path("file.py").write_text(TRAINING + LOOK + "\n@task" + DOUBLE)
    with nothing_left_behind():
        command = [str(SCRIPTS / program), *run, "file.py", "double", "--x", "21"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "42" in done.stdout
    assert "daskpytorch.node.fork_server" in done.stdout
