"""Starts the fork server while `pyflyte run` still imports the workflow's file, and torch with it: both take seconds.

A cold run takes two thirds of the time that it does without.

Flytekit imports this module at the end of its own import, by the entry point `flytekit.plugins`: from then on Flyte is
the host here, and ranks that are forked find flytekit imported.
"""

import sys

from flytekitplugins.daskpytorch.flyte import context  # noqa: F401 - makes Flyte the host
from flytekitplugins.daskpytorch.flyte.preload import IMPORTED_AHEAD
from flytekitplugins.daskpytorch.node import fork_client
from flytekitplugins.daskpytorch.process.system import runs_gangs
from flytekitplugins.daskpytorch.settings import is_debugging
from flytekitplugins.daskpytorch.task.early_start import is_worthwhile

fork_client.import_ahead(IMPORTED_AHEAD)
if is_worthwhile(sys.argv, "pyflyte") and runs_gangs() and not is_debugging():
    fork_client.connect().close()
