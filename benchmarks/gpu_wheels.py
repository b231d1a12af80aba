"""A folder of wheels that gives a machine with torch, but without a network, all that `gpu.py` needs.

`make` fills the folder here, by uv and pip. `python_with` makes a virtual environment of the wheels there. Its Python
also finds the packages of the Python that made it, such as torch with CUDA, in every child process.

This module imports only the standard library.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "flytekitplugins_daskpytorch"
TOOLS = ("pip", "pytest", "pytest-timeout", "pillow", "aiohttp", "decorator")
"""Packages beside those of the plugin. pip installs the wheels there. flytekit needs the last two by way of gcsfs."""
NOT_THERE = ("torch", "torchvision", "triton", "adlfs", "cryptography", "gcsfs", "s3fs")
"""Packages that the wheels lack, with their own requirements. The machine has the first three. It has no network, so it
needs neither buckets nor keys."""
MAX_MEGABYTES = 60.0
OLDEST, NEWEST = 5, 39
"""Versions of glibc, 2.5 to 2.39, whose wheels run on the machine."""


def make(folder: Path, python: str, machine: str, without: Sequence[str]) -> str:
    """Fill the folder with the wheels, and return their number and size in words.

    Args:
        folder: The folder. Its old wheels are removed.
        python: Version of the machine's Python, such as 3.12.
        machine: Processor of the machine, such as x86_64.
        without: Packages to leave out.

    Raises:
        SystemExit: A command failed, or the wheels are larger than `MAX_MEGABYTES`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    _do("pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    [own] = folder.glob(f"{PACKAGE}-*.whl")
    with tempfile.TemporaryDirectory() as scratch:
        asked, left_out, pinned = (Path(scratch, name) for name in ("asked.in", "left_out.txt", "pinned.txt"))
        asked.write_text("\n".join([f"{PACKAGE} @ file://{own}", *TOOLS]))
        left_out.write_text("\n".join(f"{name} ; sys_platform == 'never'" for name in (*NOT_THERE, *without)))
        told = ["--python-version", python, "--python-platform", f"{machine}-manylinux_2_28", "--override", left_out]
        _do("uv", "pip", "compile", "--quiet", *map(str, told), "--output-file", str(pinned), str(asked))
        wanted = [line for line in pinned.read_text().splitlines() if re.match(r"[\w.-]+==", line)]
        pinned.write_text("\n".join(wanted))
        tags = [f"--platform=manylinux_2_{minor}_{machine}" for minor in range(NEWEST, OLDEST - 1, -1)]
        tags += [f"--platform=manylinux{old}_{machine}" for old in ("2014", "2010", "1")]
        how = ["--quiet", "--no-deps", "--only-binary=:all:", "--implementation=cp", f"--python-version={python}"]
        _do("pip", "download", *how, *tags, "--dest", str(folder), "--requirement", str(pinned))
    return size_of(folder)


def size_of(folder: Path) -> str:
    """Return the number and size of the wheels in words.

    Raises:
        SystemExit: The wheels are larger than `MAX_MEGABYTES`.
    """
    sizes = {wheel.name: wheel.stat().st_size / 1e6 for wheel in folder.glob("*.whl")}
    largest = ", ".join(f"{name.partition('-')[0]} {sizes[name]:.1f}" for name in sorted(sizes, key=sizes.get)[:-6:-1])  # type: ignore[arg-type]
    said = f"{len(sizes)} wheels, {sum(sizes.values()):.1f} MB (the largest: {largest})"
    if sum(sizes.values()) > MAX_MEGABYTES:
        raise SystemExit(f"{folder}: {said}, more than {MAX_MEGABYTES:g} MB. Leave out what the machine has: --without")
    return said


def _do(module: str, *options: str) -> None:
    """Run pip or uv as a module of this Python."""
    try:
        subprocess.run([sys.executable, "-m", module, *options], check=True)
    except subprocess.CalledProcessError as error:
        raise SystemExit(
            f"{module} {' '.join(options)[:300]} failed with exit code {error.returncode}, see above. The extra "
            "dev has uv: pip install '.[dev]'"
        ) from None


def python_with(wheels: Path, folder: Path) -> Path:
    """Return the Python of a virtual environment in `folder` that has the wheels. Made once for the same wheels.

    The wheels' packages win over those of this Python, except torch and what else the wheels leave out.

    Raises:
        OSError: The folder cannot be written.
        ValueError: The folder of wheels lacks pip or the plugin.
        subprocess.CalledProcessError: pip failed.
    """
    python, mark = folder / "bin" / "python", folder / "wheels.json"
    content = json.dumps(sorted([wheel.name, wheel.stat().st_mtime_ns] for wheel in wheels.glob("*.whl")))
    if mark.exists() and mark.read_text() == content:
        return python
    pip = next(wheels.glob("pip-*.whl"), None)
    if pip is None or not any(wheels.glob(f"{PACKAGE}-*.whl")):
        raise ValueError(f"{wheels} lacks the wheels of pip or {PACKAGE}: make it by gpu.py --bundle")
    venv.EnvBuilder(symlinks=True, clear=True).create(folder)
    [packages] = folder.glob("lib/python3*/site-packages")
    (packages / "of_machine.pth").write_text("\n".join(_packages_here()))
    how = ["install", "--isolated", "--quiet", "--no-index", "--no-deps", "--ignore-installed"]
    how += ["--no-compile", "--no-cache-dir"]
    others = [str(wheel) for wheel in sorted(wheels.glob("*.whl")) if wheel != pip]
    command = [str(python), f"{pip}/pip", *how, *others]
    alone = {**os.environ, "PIP_CONFIG_FILE": os.devnull}  # images such as NVIDIA's constrain pip's versions
    subprocess.run(command, check=True, stdout=sys.stderr, stdin=subprocess.DEVNULL, env=alone)
    torchrun = folder / "bin" / "torchrun"  # that of the machine would start ranks without the wheels
    torchrun.write_text(f"#!{python}\nimport sys\nfrom torch.distributed.run import main\nsys.exit(main())\n")
    torchrun.chmod(0o755)
    mark.write_text(content)
    return python


def _packages_here() -> Iterator[str]:
    """Yield the folders of this Python's installed packages, in their order."""
    return (path for path in sys.path if Path(path).name in ("site-packages", "dist-packages"))
