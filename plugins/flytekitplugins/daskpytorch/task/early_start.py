"""Whether a command line may have gangs run on this machine.

Their fork server starts then before the tasks' file is imported, and torch with it: both take seconds.
"""

import contextlib
from collections.abc import Sequence
from itertools import dropwhile
from pathlib import Path

NOT_HERE = {"--remote", "-r", "--help"}
"""Options with which nothing runs here."""
NAME = b"plugins.daskpytorch"
"""As a file has it that was written for either host."""


def is_worthwhile(arguments: Sequence[str], program: str, *, here: Sequence[str] = ()) -> bool:
    """Whether a command line has something run on this machine whose file names this package.

    Args:
        arguments: The whole of it.
        program: The command whose `run` this may be.
        here: Options of which one must be there for it to run on this machine; none: it does unless others say no.
    """
    called, *rest = arguments or [""]
    _, *options = list(dropwhile(lambda option: option != "run", rest)) or [""]
    file, *what = list(dropwhile(lambda option: not option.endswith(".py"), options)) or [""]
    if Path(called).name != program or not what or not NOT_HERE.isdisjoint(rest):
        return False
    if here and set(here).isdisjoint(options[: options.index(file)]):
        return False
    with contextlib.suppress(OSError):  # what is wrong with it is the host's to say
        return NAME in Path(file).read_bytes()
    return False
