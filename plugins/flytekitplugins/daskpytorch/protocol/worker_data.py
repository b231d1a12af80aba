"""A rank's way to what the Dask worker beside it holds: the questions, and the rank's end."""

import contextlib
import logging
import pickle
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

logger = logging.getLogger(__name__)
Key = str | tuple[Any, ...]
"""What Dask calls a partition by."""
FIRST_PAUSE = 0.05
LONGEST_PAUSE = 1.0
"""Seconds between two questions for a partition that Dask is computing anew."""
NOTICE_TIME = 10.0
"""Seconds after which a rank says what it waits for."""


@dataclass(frozen=True)
class _Sizes:
    """Which of these are here, and how large are they?"""

    keys: tuple[Key, ...]


@dataclass(frozen=True)
class _Get:
    """Please send this one, from wherever it is."""

    key: Key


@dataclass(frozen=True)
class _Find:
    """Where are you, and your scheduler?"""


@dataclass(frozen=True, kw_only=True)
class Contact:
    """How a rank reaches Dask."""

    name: Any
    """The worker's."""
    address: str
    """The same."""
    scheduler: str
    """Its address; not that within the driver's process, where it has another one there."""
    reaches_workers: bool
    """Their addresses are not within one process."""
    security: Any = field(repr=False)
    """Dask's `Security`, as the worker has it."""


@dataclass(frozen=True)
class _Coming:
    """It follows, pickled."""


@dataclass(frozen=True)
class _Missing:
    """Nobody has it; this is how it stands with it, in the scheduler's words. None: the scheduler does not know it."""

    state: str | None


@dataclass(frozen=True)
class _Refused:
    """It is there and cannot be sent."""

    text: str


@dataclass(frozen=True, kw_only=True)
class WorkerData:
    """A rank's way to its Dask worker. Processes that it starts may use it, too: each request has a connection."""

    address: str
    """Of a Unix socket without a file."""
    token: bytes = field(repr=False)
    """Proves to the worker that it is a rank of its own; the first bytes on a connection."""
    guide: str
    """Our module whose `enter` shows Dask's own functions the way, in ranks that import Dask."""

    def contact(self) -> Contact:
        """Where the worker and its scheduler are."""
        contact: Contact = self._ask(_Find())
        return contact

    def sizes(self, keys: Sequence[Key]) -> dict[Key, int]:
        """Which of these the worker itself holds, and their bytes."""
        sizes: dict[Key, int] = self._ask(_Sizes(tuple(keys)))
        return sizes

    def fetch(self, key: Key) -> Any:
        """A partition, from this worker or by this worker from another; waits while Dask is computing it anew.

        Raises:
            LookupError: It is nowhere, and Dask does not or cannot compute it.
            TypeError: It cannot be pickled, or the worker cannot unpickle what another one sends.
            ConnectionError: The worker is ending.
        """
        notice_at, pause = time.monotonic() + NOTICE_TIME, FIRST_PAUSE
        while True:
            match self._ask(_Get(key)):
                case bytes(data):
                    return pickle.loads(data)  # noqa: S301 - from our own Dask worker
                case _Refused(text):
                    raise TypeError(text)
                case _Missing(state):
                    _check_coming(key, state)
            if time.monotonic() >= notice_at:
                logger.warning("still waiting for Dask to compute partition %r anew; it is %r", key, state)
                notice_at = time.monotonic() + NOTICE_TIME
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _ask(self, request: _Sizes | _Get | _Find) -> Any:
        try:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(self.address)
                connection = Connection(sock.detach())
            with contextlib.closing(connection):
                connection.send_bytes(self.token)
                connection.send(request)
                answer = connection.recv()
                return connection.recv_bytes() if isinstance(answer, _Coming) else answer
        except (EOFError, OSError) as error:
            raise ConnectionError(
                f"this rank's Dask worker hands out no data any more: it is ending ({error})"
            ) from error


def _check_coming(key: Key, state: str | None) -> None:
    if state is None:
        raise LookupError(
            f"Dask knows partition {key!r} no more. Either what was scattered, and not computed, was lost with its "
            "worker; or the driver closed its client, or released the futures, before the gang had ended."
        )
    if state == "erred":
        raise LookupError(
            f"partition {key!r} was lost with its worker, and computing it anew failed. The workers' logs say why; a "
            "worker that is lost several times while it computes is one cause (allowed-failures)."
        )
