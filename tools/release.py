"""Walks through a release, one check after the other: python tools/release.py 0.1.0.

It stops at the first thing that is not as it should be, and says what to do. It tags and uploads nothing: its last line
is the command for that. `--check-only` asks no questions, for CI.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = ("flytekitplugins/daskpytorch", "flyteplugins/daskpytorch")
"""All that a wheel holds, beside its metadata."""
LICENCES = ("LICENSE", "uPlot-LICENSE")
"""Ours, and that of what we hand on."""
QUESTIONS = (
    "Did `python tools/matrix.py` pass with today's newest versions, and is docs/versions.md committed?",
    "Did `pytest -m slow` pass?",
    "Does the changelog say what breaks, and what to do about it?",
)
SDIST_TESTS = ("tests", "--ignore=tests/scenarios", "-m", "not slow")


def fail(what: str) -> None:
    """End here, with what to do."""
    raise SystemExit(f"not ready: {what}")


def run(*command: str | Path, cwd: Path = REPOSITORY) -> str:
    """What a command says; where it fails, the release ends."""
    done = subprocess.run(command, cwd=cwd, text=True, capture_output=True, check=False)
    if done.returncode:
        fail(f"{' '.join(map(str, command))}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout.strip()


def check_version(version: str, changelog: str, project: str) -> Iterator[str]:
    """What the changelog and pyproject.toml lack of this version."""
    if tomllib.loads(project)["project"]["version"] != version:
        yield f'pyproject.toml says another: version = "{version}" there'
    found = re.search(rf"^## \[{re.escape(version)}\] - (\S+)$", changelog, re.MULTILINE)
    if found is None:
        today = datetime.now(tz=UTC).date()
        yield f'CHANGELOG.md has no "## [{version}] - {today}": move what is under "Unreleased" there'
    rest = changelog.partition("## [Unreleased]")[2].partition("\n## ")[0]
    if rest.strip():
        yield 'CHANGELOG.md has something under "Unreleased"'


def check_wheel(wheel: Path) -> Iterator[str]:
    """What it holds too much, or lacks."""
    names = zipfile.ZipFile(wheel).namelist()
    metadata = wheel.name.split("-py3")[0] + ".dist-info/"
    if strangers := [name for name in names if not name.startswith((*(f"{folder}/" for folder in PACKAGES), metadata))]:
        yield f"{wheel.name} holds {', '.join(strangers[:5])}"
    for folder in PACKAGES:
        if f"{folder}/py.typed" not in names:
            yield f"{wheel.name} lacks {folder}/py.typed"
    for licence in LICENCES:
        if not any(name.startswith(f"{metadata}licenses/") and name.endswith(f"/{licence}") for name in names):
            yield f"{wheel.name} lacks the licence {licence}"


def check_sdist(sdist: Path, tracked: set[str]) -> Iterator[str]:
    """What it lacks of the repository's files, or has beside them."""
    with tarfile.open(sdist) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()} - {"PKG-INFO"}
    if missing := sorted(tracked - files):
        yield f"{sdist.name} lacks {', '.join(missing[:5])}"
    if strangers := sorted(files - tracked):
        yield f"{sdist.name} holds {', '.join(strangers[:5])}, which git does not know"


def test_sdist(sdist: Path, wheel: Path, folder: Path) -> None:
    """Install the wheel where there is nothing else, and have the sdist's own tests try it."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    unpacked = folder / sdist.name.removesuffix(".tar.gz")
    python = folder / "venv" / "bin" / "python"
    run("uv", "venv", "--python", sys.executable, folder / "venv")
    run("uv", "pip", "install", "--python", python, f"{wheel}[dev]")
    run(python, "-m", "pytest", "-q", "-n", "2", *SDIST_TESTS, cwd=unpacked)


def build(output: Path) -> tuple[Path, Path]:
    """The wheel and the source distribution."""
    run(sys.executable, "-m", "build", "--outdir", output)
    [wheel], [sdist] = output.glob("*.whl"), output.glob("*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    return wheel, sdist


def main() -> None:
    """From the version's number to the commands that publish it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="such as 0.1.0")
    parser.add_argument("--check-only", action="store_true", help="ask nothing, and take whatever commit this is")
    parser.add_argument("--output", type=Path, help="a folder for both distributions; by default they are thrown away")
    asked = parser.parse_args()
    if not asked.check_only:
        if run("git", "status", "--porcelain"):
            fail("commit, or put away, what `git status` shows")
        if (branch := run("git", "branch", "--show-current")) != "main":
            fail(f"this is {branch}: git switch main")
    texts = [(REPOSITORY / name).read_text() for name in ("CHANGELOG.md", "pyproject.toml")]
    if problems := list(check_version(asked.version, *texts)):
        fail("; ".join(problems))
    with tempfile.TemporaryDirectory(prefix="release-") as temporary:
        output = (asked.output or Path(temporary, "dist")).absolute()
        print("building both distributions ...", flush=True)
        wheel, sdist = build(output)
        tracked = set(run("git", "ls-files").splitlines())
        if problems := [*check_wheel(wheel), *check_sdist(sdist, tracked)]:
            fail("; ".join(problems))
        print("the source distribution's tests try the wheel, in an environment of their own ...", flush=True)
        test_sdist(sdist, wheel, Path(temporary))
    if not asked.check_only:
        for question in QUESTIONS:
            if input(f"{question} [y/N] ").strip().lower() != "y":
                fail(question)
    print(f"ready: git tag -a v{asked.version} -m v{asked.version} && git push origin main v{asked.version}")


if __name__ == "__main__":
    main()
