"""Has a Dask worker start its fork server as soon as it starts itself, and so before the first gang asks for it.

For Dask's setting `distributed.worker.preload`; the task types set it for their clusters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flytekitplugins.daskpytorch.node import fork_client

if TYPE_CHECKING:
    from distributed import Worker

__all__ = ["dask_setup"]


def dask_setup(worker: Worker) -> None:
    """Called by Dask in the worker."""
    if worker.nanny is not None:
        fork_client.hand_over(worker.nanny)
    fork_client.start_ahead()
