"""How many files a process may have open: a driver a connection of each agent, rank 0 one of each rank.

Many systems begin with 1,024.
"""

from __future__ import annotations

import resource

from flytekitplugins.daskpytorch.errors import GangStartError

MAX_FILES = 1 << 16
"""That are asked for at least; also gangs side by side in one driver need some."""
OTHERS = 256
"""All that is not an agent's connection: libraries, storage, checkpoints on their way, what the program has open."""


def allow_files(wanted: int) -> int:
    """Raise this process's limit to so many files, as far as it may; how many it may have open then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed


def allow_connections(num_agents: int) -> None:
    """Raise this process's limit so that so many agents can connect.

    Raises:
        GangStartError: It may not be raised that far.
    """
    needed = num_agents + OTHERS
    if (allowed := allow_files(max(MAX_FILES, needed))) < needed:
        raise GangStartError(
            f"this process may have {allowed:,} files open (`ulimit -Hn`), and a gang on {num_agents:,} workers needs "
            f"{needed:,}: a connection for each of them, and {OTHERS} for all else. Raise the hard limit where the "
            "driver runs (LimitNOFILE= of the container runtime's service, `nofile` in limits.conf), or have fewer "
            "workers with more ranks each: Gang(ranks_per_worker=...)."
        )
