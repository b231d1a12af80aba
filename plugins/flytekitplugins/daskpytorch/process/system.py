"""Requirements of the operating system: Linux, limits of open files, process names, and optional features."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

from flytekitplugins.daskpytorch.errors import GangStartError

MAX_FILES = 1 << 16
"""Limit of open files that a driver requests at least, enough for many gangs at once. Many systems begin with 1,024."""
OTHERS = 256
"""Open files of a driver in addition to its agents' connections: libraries, storage, checkpoints, user code."""

_logger = logging.getLogger(__name__)


def runs_gangs() -> bool:
    """Return True if this system can start, watch and end ranks."""
    return sys.platform == "linux"


def running_kernel() -> str:
    """Return the boot ID of the running kernel. Return "" if the kernel has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def check_system() -> None:
    """Check that this system can run gangs. Without this check, a later error would mention only a socket.

    Raises:
        GangStartError: The system is not Linux.
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
    """Run an optional step, such as a speed-up or a display. An error is only logged.

    Args:
        what: Description of the step, for the log.
    """
    try:
        yield
    except Exception as error:  # an unknown version of torch, kernel or container may raise any exception
        _logger.warning(
            "%s failed, and is left out: %s: %s. This version of torch, the kernel or the container may be unknown to "
            "the package",
            what,
            type(error).__name__,
            error,
        )


def show_as(name: str) -> None:
    """Set this process's name in `top`, `htop` and `ps -o comm`. Linux keeps the first 15 bytes."""
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        Path("/proc/self/comm").write_text(name)


def allow_files(wanted: int) -> int:
    """Raise this process's limit of open files to `wanted`, or as far as the system allows. Return the new limit."""
    import resource  # missing on Windows, where `check_system` must run

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed


def allow_connections(num_agents: int) -> None:
    """Raise this process's limit of open files, so that the driver can have a connection to each agent.

    Raises:
        GangStartError: The system's hard limit is too low.
    """
    needed = num_agents + OTHERS
    if (allowed := allow_files(max(MAX_FILES, needed))) < needed:
        raise GangStartError(
            f"this process may have {allowed:,} files open (`ulimit -Hn`), and a gang on {num_agents:,} workers needs "
            f"{needed:,}: a connection for each of them, and {OTHERS} for all else. Raise the hard limit where the "
            "driver runs (LimitNOFILE= of the container runtime's service, `nofile` in limits.conf), or have fewer "
            "workers with more ranks each: Gang(ranks_per_worker=...)."
        )


def path_here() -> list[str]:
    """Return this process's `sys.path` without the entry for the current folder."""
    return [str(entry) for entry in sys.path if entry]


def kill_session(pid: int, signum: int) -> None:
    """Send a signal to all processes of a session, whose leader may not have begun it yet."""
    for kill, target in ((os.killpg, pid), (os.kill, pid)):  # os.kill reaches ranks before setsid
        try:
            kill(target, signum)
        except ProcessLookupError:
            continue
        return
