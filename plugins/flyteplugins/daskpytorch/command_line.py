"""Hook of `flyte run --local`: starts the fork server early, and lets Ctrl-C end a gang in good order.

Flyte's command line loads this module before the tasks' file, by the entry point `flyte.plugins.cli.hooks`.
"""

import functools
import sys
from typing import Any

from flytekitplugins.daskpytorch.node import fork_client
from flytekitplugins.daskpytorch.process.ending import CtrlC
from flytekitplugins.daskpytorch.task.in_ranks import ctrl_c
from flytekitplugins.daskpytorch.task.process import is_worthwhile
from flyteplugins.daskpytorch.preload import IMPORTED_AHEAD

HERE = ("--local", "--tracked")


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
