"""Preload for Dask workers whose ranks run a Flyte 2 task, and so import its SDK.

The task types name this module in Dask's setting `distributed.worker.preload` of their clusters.
"""

from typing import Any

from flytekitplugins.daskpytorch import preload
from flytekitplugins.daskpytorch.node import fork_client

__all__ = ["IMPORTED_AHEAD", "dask_setup"]

IMPORTED_AHEAD = "flyteplugins.daskpytorch.rank:put_to_sleep"
"""Function that the fork server calls before it forks ranks of Flyte 2's tasks. The worker needs no SDK of Flyte."""


def dask_setup(worker: Any) -> None:
    """Start the worker's fork server, which imports Flyte 2's SDK ahead. Called by Dask in the worker."""
    fork_client.import_ahead(IMPORTED_AHEAD)
    preload.dask_setup(worker)
