"""Measure the size of each extra in megabytes and packages, and the time of imports: python benchmarks/installs.py.

uv installs each extra into its own virtual environment, which is removed afterwards. The benchmark needs a package
index, and about 10 GB of disk for uv's cache and two environments. Most of the 10 GB are torch with its CUDA.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

from running import asked

REPOSITORY = Path(__file__).parents[1]
EXTRAS = ("", "pictures", "debug", "profile", "wandb", "tensorboard", "mlflow", "s3", "sweep", "lightning")
EXTRAS += ("transformers", "flyte2", "workflows")
IMPORTS = {
    "an empty Python": "pass",
    "`import flytekitplugins.daskpytorch`": "import flytekitplugins.daskpytorch",
    "`import flytekit`": "import flytekit",
    "`from flytekitplugins.daskpytorch import DaskDDP`": "from flytekitplugins.daskpytorch import DaskDDP",
    "`from flytekitplugins.daskpytorch import dispatch`": "from flytekitplugins.daskpytorch import dispatch",
    "`import torch`": "import torch",
}
OF_TORCH = ("cuda", "nvidia", "torch", "triton")
"""Beginnings of the names of torch's dependencies."""
PACKAGE = "flytekitplugins-daskpytorch"


def install(python: Path, extra: str) -> None:
    """Install the core, or the core with one extra."""
    what = f"{REPOSITORY}[{extra}]" if extra else str(REPOSITORY)
    subprocess.run(["uv", "pip", "install", "--quiet", "--python", python, what], check=True)


def sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of each package in the folder, as its list of files says."""
    return {
        found.name: sum(file.size or 0 for file in found.files or ()) for found in distributions(path=[str(folder)])
    }


def seconds(python: Path, code: str, rounds: int) -> Iterator[float]:
    """Yield the seconds of whole processes, after one that does not count."""
    for number in range(rounds + 1):
        begun = time.perf_counter()
        subprocess.run([python, "-c", code], check=True, cwd="/")
        if number:
            yield time.perf_counter() - begun


def table_of_sizes(folder: Path) -> dict[str, dict[str, int]]:
    """Return the packages of each extra. Print the size that each adds to the core."""
    found: dict[str, dict[str, int]] = {}
    print("| installed | packages | MB |\n|---|---|---|")
    for extra in EXTRAS:
        venv = folder / (extra or "core")
        subprocess.run(["uv", "venv", "--quiet", "--python", sys.executable, venv], check=True)
        install(venv / "bin" / "python", extra)
        found[extra] = sizes(next(venv.glob("lib/python*/site-packages")))
        core = found[""]
        beyond = {name: size for name, size in found[extra].items() if name not in core} if extra else core
        label, sign = (f"`{PACKAGE}[{extra}]`", "+") if extra else (f"`{PACKAGE}`", "")
        print(f"| {label} | {sign}{len(beyond)} | {sign}{sum(beyond.values()) / 1e6:,.0f} |", flush=True)
        if extra:
            subprocess.run(["rm", "-r", venv], check=True)
    return found


def main() -> None:
    """Print the tables as Markdown."""
    rounds = asked(__doc__, rounds=(7, 1, "processes of each kind, whose median counts")).rounds
    with tempfile.TemporaryDirectory(prefix="installs-") as temporary:
        folder = Path(temporary)
        core = table_of_sizes(folder)[""]
        torch = sum(size for name, size in core.items() if name.startswith(OF_TORCH))
        print(f"\nOf the core {torch / 1e6:,.0f} MB are torch with its CUDA.")
        print("\n| in a fresh process | median |\n|---|---|")
        for label, code in IMPORTS.items():
            times = list(seconds(folder / "core" / "bin" / "python", code, rounds))
            print(f"| {label} | {statistics.median(times) * 1e3:,.0f} ms |", flush=True)


if __name__ == "__main__":
    main()
