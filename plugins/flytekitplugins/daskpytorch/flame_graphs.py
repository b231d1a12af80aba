"""Command that requests a flame graph of a running rank, on this machine or a cluster. Runs in the user's terminal.

A request is a file in the folder of the rank's agent. Ranks look for requests every two seconds.
"""

from __future__ import annotations

import tempfile
import time
import uuid
from pathlib import Path

import click

from flytekitplugins.daskpytorch.command_line import call_on_each_host, scheduler_option
from flytekitplugins.daskpytorch.rank.profiler import request_name

REQUEST_TIMEOUT = 12.0
"""Timeout, in seconds, for a rank to take a request for a flame graph."""


@click.command()
@click.option("--rank", default=0, show_default=True, help="rank to record")
@click.option("--seconds", type=click.IntRange(1, 600), default=10, show_default=True, help="length of the recording")
@scheduler_option("record a rank on the workers of this Dask scheduler")
def profile(rank: int, seconds: int, scheduler: str | None) -> None:
    """Record a flame graph of a running rank with py-spy, on this machine or on a Dask cluster.

    The picture is stored among the gang's results, as profiles/rank-0-flame-graph-....svg, and the gang's log names it.
    Exit code 1 if no such rank runs.
    """
    count = ask(rank, seconds, scheduler)
    where = f"on the workers of {scheduler}" if scheduler else "on this machine"
    if count == 0:
        raise click.ClickException(
            f"no gang of this user has a running rank {rank} {where}. Start the command while the gang trains; for "
            "ranks on a Dask cluster, give --scheduler ADDRESS."
        )
    gangs = "1 gang" if count == 1 else f"{count} gangs"
    click.echo(
        f"py-spy records rank {rank} of {gangs} {where} for {seconds} s. The gang's log then names the flame graph, or "
        "the error."
    )


def ask(rank: int, seconds: int, scheduler: str | None = None) -> int:
    """Request a flame graph of one rank in every running gang, and return the number of ranks that took the request.

    Args:
        rank: Number of the rank to sample.
        seconds: Length of the sampling, in seconds.
        scheduler: Address of the Dask scheduler whose workers have the ranks. None: ranks on this machine.

    Raises:
        ClickException: The scheduler does not answer.
    """
    if scheduler is None:
        return _ask_here(rank, seconds)
    return sum(call_on_each_host(scheduler, _ask_here, rank, seconds))


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
