"""Starts the fork server while `pyflyte run` imports the workflow's file and torch: a cold run is a third shorter.

Flytekit imports this module at the end of its own import, by the entry point `flytekit.plugins`. Flyte is then the host
of this process, and the fork server imports flytekit before it forks ranks.
"""

import sys

from flytekitplugins.daskpytorch.flyte import context  # noqa: F401 - makes Flyte the host
from flytekitplugins.daskpytorch.flyte.preload import IMPORTED_AHEAD
from flytekitplugins.daskpytorch.node import fork_client
from flytekitplugins.daskpytorch.task.process import is_worthwhile

fork_client.import_ahead(IMPORTED_AHEAD)
if is_worthwhile(sys.argv, "pyflyte"):
    fork_client.connect().close()
