"""What `flyte run --local` does besides: Ctrl-C ends a gang in good order, and the fork server starts early.

Flyte's command line loads it before it imports the tasks' file, by the entry point `flyte.plugins.cli.hooks`.
"""

import functools
import sys
from typing import Any

from flytekitplugins.daskpytorch.node import fork_client
from flytekitplugins.daskpytorch.process.ctrl_c import CtrlC
from flytekitplugins.daskpytorch.process.system import runs_gangs
from flytekitplugins.daskpytorch.settings import is_debugging
from flytekitplugins.daskpytorch.task.early_start import is_worthwhile
from flytekitplugins.daskpytorch.task.in_ranks import ctrl_c
from flyteplugins.daskpytorch.preload import IMPORTED_AHEAD

HERE = ("--local", "--tracked")


def run(command: Any) -> Any:
    """The command, which resolves the names of file and task and executes that one."""
    if not is_worthwhile(sys.argv, "flyte", here=HERE) or is_debugging():
        return command
    if runs_gangs():
        fork_client.import_ahead(IMPORTED_AHEAD)
        fork_client.connect().close()
    command.invoke = functools.partial(_heeding_ctrl_c, command.invoke)
    return command


def _heeding_ctrl_c(invoke: Any, *args: Any) -> Any:
    """Flyte runs tasks in another thread than this one, where signals come."""
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
