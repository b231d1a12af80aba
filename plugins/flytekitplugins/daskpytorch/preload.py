"""Preload for Dask workers: imports torch and dynamo for its first gang while the worker starts.

Use `dask worker --preload flytekitplugins.daskpytorch.preload`, or Dask's setting `distributed.worker.preload`.
"""

from __future__ import annotations

from typing import Any

from flytekitplugins.daskpytorch.node import fork_client
from flytekitplugins.daskpytorch.process.system import check_system, optional

__all__ = ["dask_setup"]


def dask_setup(worker: Any) -> None:  # noqa: ARG001 - Dask passes the worker
    """Start the worker's fork server. Called by Dask in the worker.

    Args:
        worker: The `distributed.Worker` that Dask passes.

    Raises:
        GangStartError: The system is not Linux.

    Examples:
        >>> import dask
        >>> from distributed import Client
        >>> from flytekitplugins.daskpytorch import current_rank, dispatch
        >>> with dask.config.set({"distributed.worker.preload": ["flytekitplugins.daskpytorch.preload"]}):
        ...     client = Client(n_workers=2)
        >>> dispatch.run(client, lambda: current_rank().rank).result()
        [0, 1]
    """
    check_system()
    with optional("Starting the fork server ahead"):  # if that fails, the first gang starts one
        fork_client.connect().close()
