"""The image, as far as it can be looked at without a Docker engine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import REPOSITORY

HADOLINT = Path(sys.executable).parent / "hadolint"
TEXT = (REPOSITORY / "Dockerfile").read_text()


def instructions() -> list[tuple[str, str]]:
    """Each instruction's word and the rest, in one line."""
    lines = [line for line in TEXT.splitlines() if line and not line.startswith("#")]
    whole = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in whole.splitlines())]


def lint(file: Path) -> subprocess.CompletedProcess[str]:
    command = [str(HADOLINT), "--no-color", "--failure-threshold", "style", str(file)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_hadolint_has_nothing_to_say() -> None:
    done = lint(REPOSITORY / "Dockerfile")
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_hadolint_would_say_something(tmp_path: Path) -> None:
    bad = tmp_path / "Dockerfile"
    bad.write_text(TEXT.replace("ubuntu:24.04 AS", "ubuntu AS"))
    assert "DL3006" in lint(bad).stdout


def test_it_is_built_in_stages_and_runs_as_nobody_in_particular() -> None:
    words = [word for word, _ in instructions()]
    assert words.count("FROM") == 2
    assert "ENTRYPOINT" not in words
    [user] = [rest for word, rest in instructions() if word == "USER"]
    uid, gid = map(int, user.split(":"))
    assert min(uid, gid) > 0
    assert words[-1] == "USER"


def test_it_holds_no_secret() -> None:
    copied = {source for word, rest in instructions() if word == "COPY" for source in rest.split()[:-1]}
    assert copied == {
        *("pyproject.toml", "README.md", "LICENSE", "plugins", "tasks", "workflows", "--from=build", "/opt/venv")
    }
    assert "ARG" not in [word for word, _ in instructions()]
    assert not re.search(r"(?i)secret|password|token|api_?key", TEXT)
    ignored = (REPOSITORY / ".dockerignore").read_text().split()
    assert {".git", ".env*", ".netrc"} <= set(ignored)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_its_steps_make_an_environment_that_works(tmp_path: Path) -> None:
    """The same commands as in the image, with another folder in place of /opt/venv; not apt's."""
    build, venv, root = tmp_path / "build", tmp_path / "venv", tmp_path / "root"
    places = {"/build": build, "/root": root}
    here, num_steps = build, 0
    for word, rest in instructions():
        if word == "WORKDIR":
            here = places[rest]
            here.mkdir()
        elif word == "COPY" and not rest.startswith("--from"):
            *sources, target = rest.split()
            for source in sources:
                copy(REPOSITORY / source, here / target)
        elif word == "RUN" and "/opt/venv" in rest:
            subprocess.run(["bash", "-euc", rest.replace("/opt/venv", str(venv))], cwd=here, check=True, timeout=1700)
            num_steps += 1
    assert num_steps == 1
    shutil.rmtree(build)
    environment = {"PATH": f"{venv}/bin:{os.environ['PATH']}", "PYTHONPATH": str(root), "HOME": str(root)}
    for command in (
        "pip check",
        "dask-scheduler --version",
        "dask-worker --version",
        "pyflyte-execute --help",
        "python -m flytekitplugins.daskpytorch --no-gang",
        "python -c 'import workflows.pet_names, workflows.mnist, workflows.dogs'",
    ):
        subprocess.run(["bash", "-euc", command], cwd=root, env=environment, check=True, timeout=200)


def copy(source: Path, target: Path) -> None:
    """As Docker does, without what .dockerignore names."""
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    else:
        shutil.copy(source, target)
