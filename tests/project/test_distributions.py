"""The wheel, the source distribution, the changelog and the repository's forms are fit for a release."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from pages import REPOSITORY
from tools import release

PROJECT = (REPOSITORY / "pyproject.toml").read_text()
HOOKS = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(REPOSITORY)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def tracked() -> set[str]:
    command = ["git", "ls-files", "--cached"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("no git repository, as in a source distribution")
    return {name for name in done.stdout.splitlines() if (REPOSITORY / name).exists()}


def test_the_wheel_holds_the_package_alone_with_its_type_marker_and_licences(dist: Path) -> None:
    [wheel] = dist.glob("*.whl")
    assert list(release.check_wheel(wheel)) == []


def test_the_source_distribution_is_the_repository(dist: Path) -> None:
    files = tracked()
    [sdist] = dist.glob("*.tar.gz")
    assert [problem for problem in release.check_sdist(sdist, files) if " lacks " in problem] == []
    assert next(release.check_sdist(sdist, files | {"missing.py"})) == f"{sdist.name} lacks missing.py"


def test_twine_takes_both(dist: Path) -> None:
    command = [sys.executable, "-m", "twine", "--no-color", "check", "--strict", *map(str, dist.iterdir())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("version", "changelog", "problem"),
    [
        ("0.1.0", "## [Unreleased]\n\n## [0.1.0] - 2026-01-02\n\n- A gang.\n", None),
        ("0.1.0", "## [Unreleased]\n\n- A gang.\n\n## [0.1.0] - 2026-01-02\n", 'under "Unreleased"'),
        ("0.1.0", "## [Unreleased]\n", r"no \"## \[0\.1\.0\] - \d{4}"),
        ("0.2.0", "## [Unreleased]\n\n## [0.2.0] - 2026-01-02\n", "pyproject.toml says another"),
    ],
)
def test_a_release_has_its_version_everywhere(version: str, changelog: str, problem: str | None) -> None:
    found = list(release.check_version(version, changelog, '[project]\nversion = "0.1.0"\n'))
    assert (not found) if problem is None else re.search(problem, "; ".join(found))


def test_the_changelog_has_what_comes_next_first() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    version = tomllib.loads(PROJECT)["project"]["version"]
    assert headings[1:2] in ([], [version])


@pytest.mark.parametrize(
    "hook", [hook for hook in HOOKS if hook["entry"].startswith("check-jsonschema")], ids=lambda hook: hook["id"]
)
def test_files_for_github_match_their_schemas(hook: dict[str, Any]) -> None:
    files = [name for name in sorted(tracked()) if re.search(hook["files"], name)]
    assert files
    command = [str(Path(sys.executable).parent / hook["entry"].split()[0]), *hook["entry"].split()[1:], *files]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
