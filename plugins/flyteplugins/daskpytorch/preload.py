"""Preload for Dask workers whose ranks run a Flyte 2 task, and so import its SDK.

The task types name this module in Dask's setting `distributed.worker.preload` of their clusters.
"""

from typing import Any

from flytekitplugins.daskpytorch import preload
from flytekitplugins.daskpytorch.node import fork_client

__all__ = ["IMPORTED_AHEAD", "dask_setup"]

IMPORTED_AHEAD = "flyteplugins.daskpytorch.context:put_to_sleep"
"""`module:function` that the fork server calls before it forks ranks of Flyte 2 tasks."""


def dask_setup(worker: Any) -> None:
    """Start the Dask worker's fork server, which imports Flyte 2's SDK before ranks need it. Called by Dask."""
    fork_client.import_ahead(IMPORTED_AHEAD)
    preload.dask_setup(worker)
