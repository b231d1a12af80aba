"""Connection details of a rank's Dask worker, and through the worker of its Dask cluster."""

import contextlib
import importlib
import socket
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

Key = str | tuple[Any, ...]
"""Dask's key of a partition."""


@dataclass(frozen=True, kw_only=True)
class Contact:
    """Addresses by which a rank reaches Dask."""

    name: Any
    """Name of the worker."""
    address: str
    """Address of the worker."""
    scheduler: str
    """Address of the scheduler for other processes."""
    reaches_workers: bool
    """False if the workers are threads of one process. Other processes then reach only the scheduler."""
    security: Any = field(repr=False)
    """The worker's `Security` of Dask."""


@dataclass(frozen=True, kw_only=True)
class WorkerData:
    """Connection details of a rank's Dask worker, for the rank and the processes that the rank starts."""

    address: str
    """Address of an abstract Unix socket."""
    token: bytes = field(repr=False)
    """First bytes of a connection: proof that the process is a rank beside this worker."""
    guide: str
    """Name of the module that has `enter`, for ranks that import Dask, and `worker_of`."""

    def contact(self) -> Contact:
        """Ask the worker for its address and its scheduler's.

        Raises:
            ConnectionError: The worker is ending.
        """
        try:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(self.address)
                connection = Connection(sock.detach())
            with contextlib.closing(connection):
                connection.send_bytes(self.token)
                contact: Contact = connection.recv()
                return contact
        except (EOFError, OSError) as error:
            raise ConnectionError(f"this rank's Dask worker does not answer: it is ending ({error})") from error

    def worker(self) -> Any:
        """Return this process's stand-in for the worker, with a Dask client."""
        return importlib.import_module(self.guide).worker_of(self)
