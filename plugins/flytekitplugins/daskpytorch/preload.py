"""Has a Dask worker start its fork server as soon as it starts itself, and so before the first gang asks for it.

For Dask's setting `distributed.worker.preload`; the task types set it for their clusters.
"""

from __future__ import annotations

from flytekitplugins.daskpytorch import forkserver

__all__ = ["dask_setup"]


def dask_setup(_worker: object) -> None:
    """Called by Dask in the worker."""
    forkserver.start_ahead()
