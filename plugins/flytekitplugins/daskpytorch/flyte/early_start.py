"""Starts the fork server while `pyflyte run` still imports the workflow's file, and torch with it: both take seconds.

A cold run takes 0.63 of the time that it does without.

Flytekit imports this module at the end of its own import, by the entry point `flytekit.plugins`: from then on Flyte is
the host here, and ranks that are forked find flytekit imported.
"""

import contextlib
import sys
from collections.abc import Sequence
from itertools import dropwhile
from pathlib import Path

from flytekit.extend import TaskPlugins

from flytekitplugins.daskpytorch.flyte import context  # noqa: F401 - makes Flyte the host
from flytekitplugins.daskpytorch.flyte.preload import IMPORTED_AHEAD
from flytekitplugins.daskpytorch.node import fork_client
from flytekitplugins.daskpytorch.process.system import runs_gangs
from flytekitplugins.daskpytorch.settings import is_debugging
from flytekitplugins.daskpytorch.task.config import keep_apart

__all__ = ["is_worthwhile"]

NOT_HERE = {"--remote", "-r", "--help"}
"""Options with which nothing runs here."""
NAME = b"flytekitplugins.daskpytorch"


def is_worthwhile(arguments: Sequence[str]) -> bool:
    """Whether a command line has something run on this machine whose file names this package."""
    program, *rest = arguments or [""]
    _, *options = list(dropwhile(lambda option: option != "run", rest)) or [""]
    file, *what = list(dropwhile(lambda option: not option.endswith(".py"), options)) or [""]
    if Path(program).name != "pyflyte" or not what or not NOT_HERE.isdisjoint(rest):
        return False
    with contextlib.suppress(OSError):  # what is wrong with it is flytekit's to say
        return NAME in Path(file).read_bytes()
    return False


keep_apart("flytekit", "flytekitplugins.daskpytorch", (), TaskPlugins.register_pythontask_plugin)
fork_client.import_ahead(IMPORTED_AHEAD)
if is_worthwhile(sys.argv) and runs_gangs() and not is_debugging():
    fork_client.connect().close()
