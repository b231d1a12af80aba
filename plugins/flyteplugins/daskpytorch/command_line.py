"""Starts the fork server, which imports Flyte 2's SDK, before ranks need it: in `flyte run --local` and Dask workers.

Flyte's command line calls `run` before it loads the tasks' file, by the entry point `flyte.plugins.cli.hooks`. Dask
workers call `dask_setup`: the task types name this module in their clusters' setting `distributed.worker.preload`.
"""

import functools
import sys
from typing import Any

from flytekitplugins.daskpytorch import preload
from flytekitplugins.daskpytorch.node import fork_client
from flytekitplugins.daskpytorch.process.ending import CtrlC
from flytekitplugins.daskpytorch.task.process import ctrl_c, is_worthwhile

IMPORTED_AHEAD = "flyteplugins.daskpytorch.context:put_to_sleep"
"""`module:function` that the fork server calls before it forks ranks of Flyte 2 tasks."""
HERE = ("--local", "--tracked")


def dask_setup(worker: Any) -> None:
    """Start the Dask worker's fork server. Called by Dask."""
    fork_client.import_ahead(IMPORTED_AHEAD)
    preload.dask_setup(worker)


def run(command: Any) -> Any:
    """Start the fork server and handle Ctrl-C if the command may start gangs here. Called by Flyte's command line."""
    if not is_worthwhile(sys.argv, "flyte", here=HERE):
        return command
    fork_client.import_ahead(IMPORTED_AHEAD)
    fork_client.connect().close()
    command.invoke = functools.partial(_heeding_ctrl_c, command.invoke)
    return command


def _heeding_ctrl_c(invoke: Any, *args: Any) -> Any:
    """Call Flyte's command `run`, so that Ctrl-C ends the gangs first.

    Only the main thread can handle Ctrl-C, and Flyte runs tasks in another thread.
    """
    pressed = CtrlC()
    token = ctrl_c.set(pressed)
    try:
        with pressed.heeded():
            return invoke(*args)
    except BaseException:
        if pressed.was_pressed:
            raise KeyboardInterrupt from None
        raise
    finally:
        ctrl_c.reset(token)
