"""Which versions pass: tests of what leans on libraries, and a gang of either kind, in each corner of what is promised.

    python tools/matrix.py                 # all corners
    python tools/matrix.py lowest --keep   # one, whose environment is left for a closer look

Writes the rows of these corners into docs/versions.md, each as soon as it is known. Each corner is installed by uv into
a virtual environment of its own, which is removed again; torch with its CUDA takes 6 GB of disk per version in uv's
cache (`uv cache clean`). A Python that is not found here is said to be missing, not passed over.
"""

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import IO

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "versions.md"
BEGIN, END = "<!-- tools/matrix.py -->", "<!-- end -->"
"""In the page, around what this writes."""
SHOWN = ("torch", "distributed", "flytekit", "numpy")
COLUMNS = ("corner", "Python", *SHOWN, "tests", "gangs", "on")
GANGS = (
    "tests/scenarios/test_spawn_integration.py::test_what_a_rank_is_given_and_gives",
    "tests/scenarios/test_docs_integration.py::test_the_task_that_sends_files_returns_them",
)
"""One on the task's own node, one on a Dask cluster."""
OF_LIBRARIES = (
    *("agents", "checkpoint", "cluster", "collectives", "config", "deck", "dispatch"),
    *("extras", "flyte", "debug", "inputs", "media", "own_node", "partitions", "program"),
    *("sampling", "task", "trials", "wandb"),
)
"""The tests of what leans on torch, Dask, flytekit and the extras."""
LIMIT = 1800
"""Seconds for one corner's tests."""


@dataclass(frozen=True, kw_only=True)
class Corner:
    """One set of versions."""

    name: str
    python: str = "3.11"
    resolution: str = "highest"
    pins: tuple[str, ...] = ()
    extra: str = "test"
    tests: tuple[str, ...] = ()
    """Empty: all that need no processes, and a gang of either kind."""


CORNERS = (
    Corner(name="newest"),
    Corner(name="lowest", resolution="lowest-direct"),
    Corner(name="torch-2.6", pins=("torch==2.6.0",)),
    Corner(name="distributed-2025.1", pins=("dask==2025.1.0", "distributed==2025.1.0")),
    Corner(name="flytekit-1.16.0", pins=("flytekit==1.16.0", "flytekitplugins-dask==1.16.0")),
    Corner(name="python-3.12", python="3.12"),
    Corner(
        name="python-3.13",
        python="3.13",
        extra="",
        pins=("pytest", "pytest-timeout", "pytest-xdist"),
        tests=("--noconftest", "tests/support/without_flytekit.py"),
    ),
)


def found_pythons(version: str) -> Iterator[Path]:
    """Interpreters of this version here: on PATH, and those of pyenv."""
    if found := shutil.which(f"python{version}"):
        yield Path(found)
    yield from sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))


def works(python: Path, version: str) -> bool:
    """Whether it starts at all: a shim may stand for nothing."""
    said = subprocess.run([python, "-V"], capture_output=True, text=True, check=False)
    return said.returncode == 0 and said.stdout.startswith(f"Python {version}.")


def install(corner: Corner, python: Path, venv: Path) -> None:
    """The working tree, editable, with what its tests need."""
    subprocess.run(["uv", "venv", "--quiet", "--clear", "--python", python, venv], check=True)
    what = ["--editable", f"{REPOSITORY}[{corner.extra}]" if corner.extra else REPOSITORY, *corner.pins]
    command = ["uv", "pip", "install", "--quiet", "--python", venv / "bin" / "python"]
    subprocess.run([*command, "--resolution", corner.resolution, *what], check=True)


def run(corner: Corner, venv: Path, log: Path) -> list[str]:
    """Run its tests, and then its gangs; what came of either."""
    unit = tuple(str(path) for name in OF_LIBRARIES for path in (REPOSITORY / "tests").glob(f"*/test_{name}.py"))
    with log.open("w+") as file:
        if corner.tests:
            return ["none", pytest(venv, corner.tests, file)]
        return [pytest(venv, unit, file), pytest(venv, GANGS, file)]


def pytest(venv: Path, tests: Iterable[str], log: IO[str]) -> str:
    """What comes of these tests."""
    environment = {"PATH": f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}", "VIRTUAL_ENV": str(venv)}
    command = [venv / "bin" / "python", "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
    start = log.tell()
    subprocess.run(
        command,
        cwd=REPOSITORY,
        env=os.environ | environment | {"WANDB_MODE": "offline"},
        stdout=log,
        stderr=subprocess.STDOUT,
        timeout=LIMIT,
        check=False,
    )
    log.seek(start)
    return verdict(log.read())


def verdict(said: str) -> str:
    """How many have passed and failed; a process that ends later may say something after that."""
    summaries = re.findall(r"^(?:=+ )?((?:\d+ [a-z]+, )*\d+ [a-z]+) in [\d.]+s", said, re.MULTILINE)
    return summaries[-1] if summaries else f"broke: {said.strip().rpartition(chr(10))[2]}"


def versions(venv: Path) -> list[str]:
    """Of Python, and of what the table shows."""
    said = subprocess.run([venv / "bin" / "python", "-V"], capture_output=True, text=True, check=True).stdout
    there = {found.name: found.version for found in distributions(path=[str(next(venv.glob("lib/*/site-packages")))])}
    return [said.split()[1], *(there.get(name, "none") for name in SHOWN)]


def row(corner: Corner, folder: Path, *, keep: bool) -> list[str]:
    """Install a corner, run its tests, and say column by column how it went."""
    today = str(datetime.now(tz=UTC).date())
    python = next((path for path in found_pythons(corner.python) if works(path, corner.python)), None)
    if python is None:
        return [corner.name, corner.python, *("" for _ in SHOWN), "not tried: no such Python here", "", today]
    venv = folder / corner.name
    log = Path(tempfile.gettempdir(), f"matrix-{corner.name}.log")
    try:
        install(corner, python, venv)
        verdicts = run(corner, venv, log)
        shown = versions(venv)
    finally:
        if not keep:
            shutil.rmtree(venv, ignore_errors=True)
    print(f"{corner.name}: {'; '.join(verdicts)} (all that they said: {log})", file=sys.stderr, flush=True)
    return [corner.name, *shown, *verdicts, today]


def with_rows(page: str, rows: Mapping[str, str]) -> str:
    """The page, with these corners' rows anew, in the order of the corners."""
    before, _, rest = page.partition(BEGIN)
    written, _, after = rest.partition(END)
    known = {line.split("|")[1].strip(): line for line in written.splitlines() if line.startswith("| ")} | rows
    head = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    table = "\n".join([*head, *(known[corner.name] for corner in CORNERS if corner.name in known)])
    return f"{before}{BEGIN}\nOn {platform.system()} {platform.machine()}, without a GPU:\n\n{table}\n{END}{after}"


def main() -> None:
    """Try the corners that were asked for, and write their rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corners", nargs="*", help=f"of {', '.join(corner.name for corner in CORNERS)}; all by default")
    parser.add_argument("--keep", action="store_true", help="leave the environments where they are, and say where")
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="matrix-"))
    for corner in CORNERS:
        if not asked.corners or corner.name in asked.corners:
            written = f"| {' | '.join(row(corner, folder, keep=asked.keep))} |"
            print(written, flush=True)
            PAGE.write_text(with_rows(PAGE.read_text(), {corner.name: written}))
    print(f"environments: {folder}" if asked.keep else "", file=sys.stderr)


if __name__ == "__main__":
    main()
