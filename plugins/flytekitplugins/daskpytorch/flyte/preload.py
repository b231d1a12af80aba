"""Preload for Dask workers whose ranks run a flytekit task, and so import flytekit.

The task types name this module in Dask's setting `distributed.worker.preload` of their clusters.
"""

from typing import Any

from flytekitplugins.daskpytorch import preload
from flytekitplugins.daskpytorch.node import fork_client

IMPORTED_AHEAD = "flytekitplugins.daskpytorch.flyte.rank:finish_imports"
"""Function that the fork server calls before it forks ranks of Flyte tasks. The worker itself needs no flytekit."""


def dask_setup(worker: Any) -> None:
    """Start the worker's fork server, which imports flytekit ahead. Called by Dask in the worker."""
    fork_client.import_ahead(IMPORTED_AHEAD)
    preload.dask_setup(worker)
