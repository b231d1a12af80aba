"""Has a Dask worker start its fork server as soon as it starts itself, and so before the first gang asks for it.

For Dask's setting `distributed.worker.preload`; the task types set it for their clusters.
"""

from typing import Any

from flytekitplugins.daskpytorch.node import fork_client

__all__ = ["IMPORTED_AHEAD", "dask_setup"]

IMPORTED_AHEAD = "flyteplugins.daskpytorch.import_ahead"
"""What ranks of Flyte 2's tasks need besides; not to be imported here, where Flyte is not needed."""


def dask_setup(worker: Any) -> None:
    """Called by Dask in the worker."""
    fork_client.import_ahead(IMPORTED_AHEAD)
    if worker.nanny is not None:
        fork_client.hand_over(worker.nanny)
    fork_client.start_ahead()
