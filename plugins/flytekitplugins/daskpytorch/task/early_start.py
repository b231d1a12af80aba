"""Check whether a command line may start gangs on this machine.

If so, their fork server starts before the tasks' file and torch are imported. Both take seconds.
"""

import contextlib
from collections.abc import Sequence
from itertools import dropwhile
from pathlib import Path

NOT_HERE = {"--remote", "-r", "--help"}
"""Options with which a command line runs no task on this machine."""
NAME = b"plugins.daskpytorch"
"""Part of this package's name that a file has for either host."""


def is_worthwhile(arguments: Sequence[str], program: str, *, here: Sequence[str] = ()) -> bool:
    """Return True if a command line runs a task on this machine, from a file that names this package.

    Args:
        arguments: All words of the command line.
        program: Name of the command with the subcommand `run`.
        here: Options of which a local run has at least one. Empty: every run is local, unless it has an option of
            `NOT_HERE`.
    """
    called, *rest = arguments or [""]
    _, *options = list(dropwhile(lambda option: option != "run", rest)) or [""]
    file, *what = list(dropwhile(lambda option: not option.endswith(".py"), options)) or [""]
    if Path(called).name != program or not what or not NOT_HERE.isdisjoint(rest):
        return False
    if here and set(here).isdisjoint(options[: options.index(file)]):
        return False
    with contextlib.suppress(OSError):  # the host reports an unreadable file
        return NAME in Path(file).read_bytes()
    return False
