"""Asks for a flame graph of a rank that is running, here or on a cluster. Runs in the process of `__main__`.

The request is a file in the folder of the rank's agent; the rank looks for it every two seconds.
"""

from __future__ import annotations

import tempfile
import time
import uuid
from pathlib import Path

from flytekitplugins.daskpytorch.rank.flame_graph import request_name

__all__ = ["ask"]

PATIENCE = 12.0
"""Seconds for a rank to take a request."""
CONNECT_TIMEOUT = 10.0


def ask(rank: int, seconds: int, scheduler: str | None = None) -> int:
    """Have this rank of all gangs here, or on the workers of this Dask scheduler, watched; how many there are.

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
    """Not to keep the worker from its other business."""
    import asyncio

    return await asyncio.to_thread(_ask_here, rank, seconds)


def _ask_here(rank: int, seconds: int) -> int:
    """A request that nobody takes is withdrawn: the rank is not there."""
    name = request_name(rank, seconds, uuid.uuid4().hex)
    requests = [folder / name for folder in _agents_folders()]
    placed = [request for request in requests if _place(request)]
    give_up_at = time.monotonic() + PATIENCE
    while any(request.exists() for request in placed) and time.monotonic() < give_up_at:
        time.sleep(0.1)
    return sum(not _withdraw(request) for request in placed)


def _agents_folders() -> set[Path]:
    """Those in which ranks have their stacks; some of the agents may be long dead."""
    return {stacks.parent for stacks in Path(tempfile.gettempdir()).glob("daskpytorch-*/stacks-*")}


def _place(request: Path) -> bool:
    try:
        request.touch()
    except OSError:  # somebody else's, or gone
        return False
    return True


def _withdraw(request: Path) -> bool:
    """Whether it was still there; one whose rank's agent has gone meanwhile, with its folder, was not taken either."""
    try:
        request.unlink()
    except FileNotFoundError:
        return not request.parent.exists()
    return True
