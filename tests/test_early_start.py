"""When the fork server is started ahead: only where something will run here that may need it, with either SDK."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from flytekitplugins.daskpytorch.task.early_start import is_worthwhile
from flyteplugins.daskpytorch.command_line import HERE
from processes import SCRIPTS, nothing_left_behind

TRAINING = "from flytekit import task\nfrom flytekitplugins.daskpytorch import DaskDDP\n"
OTHER = "from flytekit import task\n"


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("training.py").write_text(TRAINING)
    Path("other.py").write_text(OTHER)


@pytest.mark.parametrize(
    "line",
    [
        "/usr/bin/pyflyte run training.py train",
        "pyflyte run training.py train --file other.py",
        "pyflyte -v run --copy auto ./training.py train --steps 3",
    ],
)
def test_a_local_run_of_a_file_that_names_the_package_is_worth_it(line: str) -> None:
    assert is_worthwhile(line.split(), "pyflyte")


@pytest.mark.parametrize(
    "line",
    [
        "pyflyte run other.py train --file training.py",
        "pyflyte run --remote training.py train",
        "pyflyte run -r training.py train",
        "pyflyte run training.py train --help",
        "pyflyte run training.py",
        "pyflyte run nowhere.py train",
        "pyflyte run",
        "pyflyte register training.py run",
        "pyflyte",
        "pyflyte-execute run training.py train",
        "python training.py run training.py train",
        "",
    ],
)
def test_nothing_else_is(line: str) -> None:
    assert not is_worthwhile(line.split(), "pyflyte")


@pytest.mark.parametrize(
    "line", ["/usr/bin/flyte run --local training.py train", "flyte -v run --tracked ./training.py train --steps 3"]
)
def test_a_local_run_of_flyte_2_is_worth_it(line: str) -> None:
    assert is_worthwhile(line.split(), "flyte", here=HERE)


@pytest.mark.parametrize(
    "line",
    [
        "flyte run training.py train",
        "flyte run training.py train --local",
        "flyte run --local other.py train",
        "flyte run --local training.py train --help",
        "flyte run --local training.py",
        "flyte deploy --local training.py run",
        "pyflyte run --local training.py train",
    ],
)
def test_no_other_of_flyte_2_is(line: str) -> None:
    assert not is_worthwhile(line.split(), "flyte", here=HERE)


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
import flyte
env = flyte.TaskEnvironment("plain")
"""


@pytest.mark.parametrize("names_it", [True, False])
@pytest.mark.parametrize(("program", "run"), [("pyflyte", ("run",)), ("flyte", ("run", "--local"))])
def test_it_runs_before_the_file_is_imported_and_is_ended_unused(
    program: str, run: tuple[str, ...], names_it: bool
) -> None:
    if program == "flyte":
        pytest.importorskip("flyteplugins.dask")
        imported = "import flyteplugins.daskpytorch\n" if names_it else ""
        Path("file.py").write_text(imported + OF_FLYTE_2 + LOOK + "\n@env.task" + DOUBLE)
    else:
        Path("file.py").write_text((TRAINING if names_it else OTHER) + LOOK + "\n@task" + DOUBLE)
    with nothing_left_behind():
        command = [str(SCRIPTS / program), *run, "file.py", "double", "--x", "21"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "42" in done.stdout
    assert ("daskpytorch.node.fork_server" in done.stdout) == names_it
