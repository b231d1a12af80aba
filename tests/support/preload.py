"""Fork servers that import what ranks of tests need: once, and not in every rank anew. Preloaded by Dask's workers."""

import os
from typing import Any

from flytekitplugins.daskpytorch.node import fork_client

VARIABLE = "DASKPYTORCH_TEST_IMPORTED_AHEAD"
TESTS_IMPORT = ("distributed", "pytest")
"""What takes longest of what the modules of tests import, and so each rank that runs one of their functions."""


def dask_setup(worker: Any) -> None:
    """Called by Dask in the worker."""
    for name in os.environ[VARIABLE].split():
        fork_client.import_ahead(name)
