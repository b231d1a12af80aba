"""The preload of workers in whose ranks a task of Flyte runs, which import flytekit.

For Dask's setting `distributed.worker.preload`; the task types set it for their clusters.
"""

from typing import Any

from flytekitplugins.daskpytorch import preload
from flytekitplugins.daskpytorch.node import fork_client

IMPORTED_AHEAD = "flytekitplugins.daskpytorch.flyte.import_ahead"
"""What ranks of Flyte tasks need besides; not to be imported here, where flytekit is not needed."""


def dask_setup(worker: Any) -> None:
    """Called by Dask in the worker."""
    fork_client.import_ahead(IMPORTED_AHEAD)
    preload.dask_setup(worker)
