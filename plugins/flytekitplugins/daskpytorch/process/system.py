"""On which systems gangs run, said before one starts; what a system shows of a process; what it may lack."""

from __future__ import annotations

import contextlib
import logging
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

from flytekitplugins.daskpytorch.errors import GangStartError

MAX_FILES = 1 << 16
"""Open files that a driver asks for at least: gangs side by side need some. Many systems begin with 1,024."""
OTHERS = 256
"""Open files of a driver beside its agents' connections: libraries, storage, checkpoints, the program's own."""

_logger = logging.getLogger(__name__)


def runs_gangs() -> bool:
    """Whether ranks can be started, watched and ended here."""
    return sys.platform == "linux"


def running_kernel() -> str:
    """Return the kernel's name for itself since it has started; "" where the kernel has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


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


def allow_files(wanted: int) -> int:
    """Raise this process's limit of open files to so many, as far as the system allows; return the new limit."""
    import resource  # not on Windows, where this module says so

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed


def allow_connections(num_agents: int) -> None:
    """Raise this process's limit of open files so that so many agents can connect.

    Raises:
        GangStartError: The system does not allow so many.
    """
    needed = num_agents + OTHERS
    if (allowed := allow_files(max(MAX_FILES, needed))) < needed:
        raise GangStartError(
            f"this process may have {allowed:,} files open (`ulimit -Hn`), and a gang on {num_agents:,} workers needs "
            f"{needed:,}: a connection for each of them, and {OTHERS} for all else. Raise the hard limit where the "
            "driver runs (LimitNOFILE= of the container runtime's service, `nofile` in limits.conf), or have fewer "
            "workers with more ranks each: Gang(ranks_per_worker=...)."
        )
