"""Common parts of the command `daskpytorch`: the option for a Dask scheduler, and calls on its workers' machines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import click

from flytekitplugins.daskpytorch.errors import GangStartError
from flytekitplugins.daskpytorch.settings import SCHEDULER_VARIABLE

CONNECT_TIMEOUT = 10.0
"""Timeout, in seconds, for the Dask scheduler to answer."""
SOURCE = f"--scheduler or {SCHEDULER_VARIABLE}: without them, this machine is meant"
"""Settings that name the Dask scheduler, for messages."""


def scheduler_option(what: str) -> Callable[[Any], Any]:
    """Return the decorator that adds the option `--scheduler` to a command.

    Args:
        what: Effect of the option, for `--help`.
    """
    return click.option("--scheduler", metavar="ADDRESS", envvar=SCHEDULER_VARIABLE, show_envvar=True, help=what)


def call_on_each_host(scheduler: str, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call an installed function in one Dask worker of each machine, and return its return values.

    Raises:
        ClickException: The scheduler does not answer.
    """
    from distributed import Client

    from flytekitplugins.daskpytorch.dask.cluster import identity

    try:
        with Client(scheduler, timeout=CONNECT_TIMEOUT) as client:
            workers = identity(client, CONNECT_TIMEOUT)["workers"]
            one_of_each_host = {worker["host"]: address for address, worker in workers.items()}
            found = client.run(_in_thread, function, *args, workers=list(one_of_each_host.values()))
    except (OSError, GangStartError) as error:
        raise click.ClickException(
            f"the scheduler at {scheduler} ({SOURCE}) does not answer: {error}. Check the address, "
            "and the scheduler's log"
        ) from error
    return list(found.values())


async def _in_thread(function: Callable[..., Any], *args: Any) -> Any:
    """In a Dask worker: call a function in a thread, so that the worker's event loop stays free."""
    return await asyncio.to_thread(function, *args)
