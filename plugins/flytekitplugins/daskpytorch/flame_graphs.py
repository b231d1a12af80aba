"""Request for a flame graph of a running rank, on this machine or a cluster. Runs in the user's command.

A request is a file in the folder of the rank's agent. Ranks look for requests every two seconds.
"""

from __future__ import annotations

import tempfile
import time
import uuid
from pathlib import Path

from flytekitplugins.daskpytorch.rank.profiler import request_name

__all__ = ["ask"]

REQUEST_TIMEOUT = 12.0
"""Timeout, in seconds, for a rank to take a request for a flame graph."""
CONNECT_TIMEOUT = 10.0


def ask(rank: int, seconds: int, scheduler: str | None = None) -> int:
    """Request a flame graph of one rank in every running gang, and return the number of ranks that took the request.

    Args:
        rank: Number of the rank to sample.
        seconds: Length of the sampling, in seconds.
        scheduler: Address of the Dask scheduler whose workers have the ranks. None: ranks on this machine.

    Raises:
        OSError: The scheduler does not answer.
    """
    if scheduler is None:
        return _ask_here(rank, seconds)
    from distributed import Client

    from flytekitplugins.daskpytorch.dask.cluster import identity

    with Client(scheduler, timeout=CONNECT_TIMEOUT) as client:
        workers = identity(client, CONNECT_TIMEOUT)["workers"]
        one_of_each_host = {worker["host"]: address for address, worker in workers.items()}
        counts: dict[str, int] = client.run(_ask_on_worker, rank, seconds, workers=list(one_of_each_host.values()))
        return sum(counts.values())


async def _ask_on_worker(rank: int, seconds: int) -> int:
    """In a Dask worker: request flame graphs on its machine, and return the number of ranks that took the request.

    A thread does the work, so that the worker's event loop stays free.
    """
    import asyncio

    return await asyncio.to_thread(_ask_here, rank, seconds)


def _ask_here(rank: int, seconds: int) -> int:
    """Request flame graphs on this machine, and return the number of ranks that took the request.

    A request that no rank takes within `REQUEST_TIMEOUT` seconds is withdrawn.
    """
    name = request_name(rank, seconds, uuid.uuid4().hex)
    # Each agent's folder has an entry `stacks-*`. A dead agent may have left its folder.
    requests = {stacks.with_name(name) for stacks in Path(tempfile.gettempdir()).glob("daskpytorch-*/stacks-*")}
    placed = [request for request in requests if _place(request)]
    give_up_at = time.monotonic() + REQUEST_TIMEOUT
    while any(request.exists() for request in placed) and time.monotonic() < give_up_at:
        time.sleep(0.1)
    num_taken = sum(not request.exists() and request.parent.exists() for request in placed)  # not with a dead agent
    for request in placed:
        request.unlink(missing_ok=True)
    return num_taken


def _place(request: Path) -> bool:
    try:
        request.touch()
    except OSError:  # another user's folder, or a removed one
        return False
    return True
