"""On which systems gangs run, said before one starts; what a system shows of a process; what it may lack."""

from __future__ import annotations

import contextlib
import logging
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

from flytekitplugins.daskpytorch.errors import GangStartError

_logger = logging.getLogger(__name__)


def runs_gangs() -> bool:
    """Whether ranks can be started, watched and ended here."""
    return sys.platform == "linux"


def check_system() -> None:
    """Refuse what would fail later, in words that tell of a socket.

    Raises:
        GangStartError: This is not Linux.
    """
    if not runs_gangs():
        raise GangStartError(
            f"gangs run on Linux, and this is {platform.system()}: ranks are watched by what only Linux has (abstract "
            "and packet sockets, signals at a parent's end, pidfds). Train here in one rank, in this process, with "
            "DASKPYTORCH_DEBUG=1 or Gang(debug=True); or run it in a Linux container, or on a cluster, for which tasks "
            "can be registered from here."
        )


@contextlib.contextmanager
def optional(what: str) -> Iterator[None]:
    """Run what only makes a gang faster, or only shows something: an error costs a line in the log, and ends nothing.

    Args:
        what: What is done, for that line.
    """
    try:
        yield
    except Exception as error:  # of a torch, kernel or container that is not known here
        _logger.warning("%s failed, which ends nothing: %s: %s", what, type(error).__name__, error)


def show_as(name: str) -> None:
    """Have `top`, `htop` and `ps -o comm` call this process so; Linux keeps the first 15 bytes."""
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        Path("/proc/self/comm").write_text(name)
