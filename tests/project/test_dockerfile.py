"""The image holds no secret, runs as user 1000 on a read-only root, and has the backend's commands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from backend import image
from pages import REPOSITORY

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


def test_it_runs_as_nobody_in_particular() -> None:
    words = [word for word, _ in instructions()]
    assert "ENTRYPOINT" not in words
    [user] = [rest for word, rest in instructions() if word == "USER"]
    uid, gid = map(int, user.split(":"))
    assert min(uid, gid) > 0
    assert words[-1] == "USER"


def test_pod_without_gpus_in_its_limits_sees_none() -> None:
    """The base image says `all`, and the last word on a variable counts."""
    settings = " ".join(rest for word, rest in instructions() if word == "ENV").split()
    assert dict(setting.split("=", 1) for setting in settings)["NVIDIA_VISIBLE_DEVICES"] == "void"


def test_it_holds_no_secret() -> None:
    copied = {source for word, rest in instructions() if word == "COPY" for source in rest.split()[:-1]}
    ours = {"pyproject.toml", "README.md", "LICENSE", "plugins", "tasks", "workflows", "--chown=1000:1000"}
    assert copied == ours
    assert {rest.partition("=")[0] for word, rest in instructions() if word == "ARG"} == {"BASE", "TORCH_INDEX"}
    assert not re.search(r"(?i)secret|password|token|api_?key", TEXT)
    ignored = (REPOSITORY / ".dockerignore").read_text().split()
    assert {".git", ".env*", ".netrc"} <= set(ignored)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_image_is_built_and_runs_on_a_read_only_root() -> None:
    if not image.is_docker_there():
        pytest.skip("building the image needs Docker")
    done = subprocess.run([sys.executable, image.__file__], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-20_000:]
