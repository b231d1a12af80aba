"""What is installed only where it is asked for, and what is said where it is not. Imports nothing of ours."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import find_spec

__all__ = ["PACKAGES", "is_installed", "require_extra", "require_flytekit"]

DISTRIBUTION = "flytekitplugins-daskpytorch"
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "dataframe": ("pandas", "pyarrow"),
    "debug": ("debugpy",),
    "flyte2": ("flyte", "flyteplugins.dask"),
    "lightning": ("lightning",),
    "mlflow": ("mlflow", "PIL"),
    "pictures": ("PIL",),
    "s3": ("botocore", "obstore", "PIL", "torchvision"),
    "sweep": ("optuna", "pandas"),
    "tensorboard": ("tensorboard",),
    "transformers": ("accelerate", "transformers"),
    "wandb": ("wandb", "PIL"),
}
"""An extra -> what of it is imported."""


def require_extra(extra: str, what: str) -> None:
    """Check that an extra's packages are there, without importing them; to be called when something is configured.

    Raises:
        ImportError: Some are not; it says what needs them, and how to install them.
    """
    if missing := [package for package in PACKAGES[extra] if not is_installed(package)]:
        raise ImportError(
            f"{what} needs {', '.join(missing)}, not installed for {sys.executable}: "
            f"pip install '{DISTRIBUTION}[{extra}]', here and where the ranks run",
            name=missing[0],
        )


def is_installed(package: str) -> bool:
    """Whether it can be imported. A folder of its name is not enough, such as what offline runs are written to."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def require_flytekit(what: str) -> None:
    """Check that flytekit is there, whose tasks the caller is about to define.

    Raises:
        ImportError: It is not; for Python 3.13 and newer it has no release.
    """
    if is_installed("flytekit") and is_installed("flytekitplugins.dask"):
        return
    advice = (
        f"pip install '{DISTRIBUTION}'"
        if sys.version_info < (3, 13)
        else "it has no release for Python 3.13 and newer: take Python 3.11 or 3.12, or "
        f"pip install '{DISTRIBUTION}[flyte2]' and Flyte 2's flyteplugins.daskpytorch"
    )
    raise ImportError(f"{what} needs flytekit, not installed for {sys.executable}: {advice}", name="flytekit")
