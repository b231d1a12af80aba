"""Starts the fork server, which imports flytekit, before ranks need it: in `pyflyte run` and in Dask workers.

Flytekit imports this module at the end of its own import, by the entry point `flytekit.plugins`. Flyte is then the host
of this process, and `pyflyte run` starts the fork server before it imports the workflow's file and torch: a cold run is
a third shorter. Dask workers call `dask_setup`: the task types name this module in Dask's setting
`distributed.worker.preload` of their clusters.
"""

import sys

from flytekitplugins.daskpytorch.node import fork_client
from flytekitplugins.daskpytorch.preload import dask_setup  # noqa: F401 - Dask calls it

fork_client.import_ahead("flytekitplugins.daskpytorch.flyte.context:finish_imports")
if "flytekit" in sys.modules:  # a Dask worker does without
    from flytekitplugins.daskpytorch.flyte import context  # noqa: F401 - makes Flyte the host
    from flytekitplugins.daskpytorch.task.process import is_worthwhile

    if is_worthwhile(sys.argv, "pyflyte"):
        fork_client.connect().close()
