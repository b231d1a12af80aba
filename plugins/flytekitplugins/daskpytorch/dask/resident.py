"""Stays on one worker and runs the agents of one gang after the other there. Runs beside a Dask worker; knows no Dask.

A worker that trains a thousand models is asked once, not a thousand times: Dask's scheduler, the worker's event loop
and its threads have nothing to do with the gangs that come and go.
"""

from __future__ import annotations

import contextlib
from multiprocessing.connection import wait

from flytekitplugins.daskpytorch.node import agent
from flytekitplugins.daskpytorch.protocol.messages import AgentOrder, Arrived, Failed
from flytekitplugins.daskpytorch.protocol.worker_data import WorkerData

__all__ = ["stay"]


def stay(order: AgentOrder, leaving: int, data: WorkerData | None = None) -> None:
    """Run the agents that the driver orders, until it hangs up.

    Args:
        order: Where the driver is.
        leaving: A file descriptor that becomes readable when this process is told to end.
        data: The ranks' way to what this worker holds.

    Raises:
        ConnectionError: The driver cannot be reached from here.
    """
    with contextlib.closing(agent.dial(order)) as connection, contextlib.suppress(EOFError, OSError):
        connection.send(Arrived(order.worker))
        while connection.fileno() in wait([connection.fileno(), leaving]):
            asked: AgentOrder = connection.recv()
            try:
                agent.run(asked, leaving, data)
            except Exception as error:  # whatever it is, it is that gang's; the next one may do better
                connection.send(Failed(asked.token, f"{type(error).__name__}: {error}"))
