"""A rank's way to the Dask worker beside it, and through it to that worker's cluster."""

import contextlib
import importlib
import socket
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

Key = str | tuple[Any, ...]
"""Dask's name of a partition."""


@dataclass(frozen=True, kw_only=True)
class Contact:
    """How a rank reaches Dask."""

    name: Any
    """Name of the worker."""
    address: str
    """Address of the worker."""
    scheduler: str
    """Address of the scheduler, for other processes than its own."""
    reaches_workers: bool
    """False if the workers are threads of one process, which other processes reach by the scheduler alone."""
    security: Any = field(repr=False)
    """Dask's `Security`, as the worker has it."""


@dataclass(frozen=True, kw_only=True)
class WorkerData:
    """A rank's way to its Dask worker. Processes that the rank starts may use it, too."""

    address: str
    """Address of a Unix socket without a file."""
    token: bytes = field(repr=False)
    """First bytes on a connection: they prove that the process is a rank of the worker's own."""
    guide: str
    """Name of the module that has `enter`, for ranks that import Dask, and `worker_of`."""

    def contact(self) -> Contact:
        """Ask the worker where it and its scheduler are.

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
        """Return the worker as ranks know it, with a Dask client of this process."""
        return importlib.import_module(self.guide).worker_of(self)
