"""The preload of workers in whose ranks a task of Flyte 2 runs, which import its SDK.

For Dask's setting `distributed.worker.preload`; the task types set it for their clusters.
"""

from typing import Any

from flytekitplugins.daskpytorch import preload
from flytekitplugins.daskpytorch.node import fork_client

__all__ = ["IMPORTED_AHEAD", "dask_setup"]

IMPORTED_AHEAD = "flyteplugins.daskpytorch.import_ahead"
"""What ranks of Flyte 2's tasks need besides; not to be imported here, where Flyte is not needed."""


def dask_setup(worker: Any) -> None:
    """Called by Dask in the worker."""
    fork_client.import_ahead(IMPORTED_AHEAD)
    preload.dask_setup(worker)
