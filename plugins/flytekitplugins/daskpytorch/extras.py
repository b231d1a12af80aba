"""Optional dependencies, and the errors that name a missing one. Imports no module of this package."""

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
    "opentelemetry": ("opentelemetry.metrics",),
    "pictures": ("PIL",),
    "s3": ("botocore", "obstore", "PIL", "torchvision"),
    "sweep": ("optuna", "pandas"),
    "tensorboard": ("tensorboard",),
    "transformers": ("accelerate", "transformers"),
    "wandb": ("wandb", "PIL"),
}
"""Importable packages that each extra of this package installs, by the extra's name (`pip install ...[extra]`)."""


def require_extra(extra: str, what: str) -> None:
    """Check that the packages of an extra are installed, without importing them.

    Args:
        extra: Name of the extra, such as `wandb`.
        what: Name of the class that needs the extra, for the error.

    Raises:
        ImportError: A package is missing. The message names the config and the install command.
    """
    if missing := [package for package in PACKAGES[extra] if not is_installed(package)]:
        raise ImportError(
            f"{what} needs {', '.join(missing)}, not installed for {sys.executable}: "
            f"pip install '{DISTRIBUTION}[{extra}]', here and where the ranks run",
            name=missing[0],
        )


def is_installed(package: str) -> bool:
    """Return True if a package can be imported. A folder of its name without code, such as `wandb/`, does not count."""
    try:
        spec = find_spec(package)
    except ModuleNotFoundError:  # of the package around it
        return False
    return spec is not None and spec.origin is not None


def require_flytekit(what: str) -> None:
    """Check that flytekit is installed. `what` is the name of the config that needs flytekit, for the error.

    Raises:
        ImportError: flytekit is missing. Python 3.13 and newer have no release of flytekit.
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
