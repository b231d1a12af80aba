"""Preload for Dask workers whose ranks run a flytekit task, and so import flytekit.

The task types name this module in Dask's setting `distributed.worker.preload` of their clusters.
"""

from typing import Any

from flytekitplugins.daskpytorch import preload
from flytekitplugins.daskpytorch.node import fork_client

IMPORTED_AHEAD = "flytekitplugins.daskpytorch.flyte.context:finish_imports"
"""`module:function` that the fork server calls before it forks ranks of flytekit tasks."""


def dask_setup(worker: Any) -> None:
    """Start the Dask worker's fork server, which imports flytekit before ranks need it. Called by Dask."""
    fork_client.import_ahead(IMPORTED_AHEAD)
    preload.dask_setup(worker)
