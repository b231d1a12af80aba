"""On which systems gangs run, said before one starts; and what a system shows of a process."""

from __future__ import annotations

import contextlib
import platform
import sys
from pathlib import Path

from flytekitplugins.daskpytorch.errors import GangStartError

__all__ = ["check_system", "runs_gangs", "show_as"]


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


def show_as(name: str) -> None:
    """Have `top`, `htop` and `ps -o comm` call this process so; Linux keeps the first 15 bytes."""
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        Path("/proc/self/comm").write_text(name)
