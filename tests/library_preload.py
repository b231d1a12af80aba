"""Has a Dask worker's fork server import the libraries of `library_examples.py` before it forks: once for all ranks."""

from __future__ import annotations

from typing import Any

from flytekitplugins.daskpytorch.node import fork_client


def dask_setup(worker: Any) -> None:
    """Called by Dask in the worker."""
    fork_client.import_ahead("library_imports")
