"""Connects an agent, or a rank with a file, to the gang's driver. Runs in agents and ranks."""

import contextlib
import socket
import time

from flytekitplugins.daskpytorch.protocol.framing import Connection, introduce, watch_peer
from flytekitplugins.daskpytorch.protocol.host import AgentOrder
from flytekitplugins.daskpytorch.protocol.placement import title_of

DIAL_TIMEOUT = 30.0
DIAL_WAITS = (0.1, 0.3, 1.0, 2.0, 4.0)
"""Seconds before each retry to connect."""


def dial(order: AgentOrder, retried: type[ConnectionError] = ConnectionAbortedError) -> Connection:
    """Connect to the driver. By default, only a driver that has hung up is tried again.

    Raises ConnectionError if the driver cannot be reached, or is another gang's.
    """
    for wait_for in DIAL_WAITS:
        with contextlib.suppress(retried):
            return _dial_once(order)
        time.sleep(wait_for)
    return _dial_once(order)


def _this_worker(order: AgentOrder) -> str:
    return f"the worker {title_of(order.worker, socket.gethostname())}"


def _dial_once(order: AgentOrder) -> Connection:
    host, port = order.driver
    try:
        sock = socket.create_connection((host, port), timeout=DIAL_TIMEOUT)
    except OSError as error:
        raise ConnectionError(
            f"{_this_worker(order)} cannot reach the driver at {host}:{port} ({error}). Workers must be able to "
            "open connections to the machine that runs the task: check network policies and firewalls."
        ) from error
    sock.settimeout(None)
    watch_peer(sock)
    try:
        return introduce(sock, order.token)
    except ConnectionAbortedError as error:
        raise ConnectionAbortedError(
            f"{_this_worker(order)} called {host}:{port}, and the driver of its gang is not there, or has too many "
            f"other callers ({error}). The driver may have ended, another program may use its port, or a proxy between "
            "them may hang up. See the driver's log for other callers, and check that the worker reaches this address "
            "directly."
        ) from error
    except ConnectionRefusedError as error:
        raise ConnectionError(
            f"{_this_worker(order)} called {host}:{port}, and the driver of its gang is not there ({error}). "
            "The driver may have ended, and another program may use its port: check the driver, and start the run again"
        ) from error
