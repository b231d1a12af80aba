"""What a Dask worker holds, for the ranks beside it: the worker's end and the ranks' end.

A rank asks its own worker, which knows its cluster: where else a partition is, and how to get it from there, by TLS or
within one process. What passes between two workers passes through neither the scheduler nor the driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import cloudpickle

if TYPE_CHECKING:
    from distributed import Worker

__all__ = ["Key", "WorkerData", "served"]

logger = logging.getLogger("flytekitplugins.daskpytorch")

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


# ---- The ranks' end -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WorkerData:
    """A rank's way to its Dask worker. Processes that it starts may use it, too: each request has a connection."""

    address: str
    """Of a Unix socket without a file."""
    token: bytes = field(repr=False)
    """Proves to the worker that it is a rank of its own; the first bytes on a connection."""

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

    def _ask(self, request: _Sizes | _Get) -> Any:
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


# ---- The worker's end -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def served(worker: Worker) -> Iterator[WorkerData]:
    """Answer ranks until the end of this context; gives what they need to ask."""
    way = WorkerData(address=f"\0daskpytorch-{os.getpid()}-{secrets.token_hex(8)}", token=secrets.token_bytes(32))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(way.address)
        server.listen(128)
        args = (server, worker, way.token)
        threading.Thread(target=_accept, args=args, name="daskpytorch-data", daemon=True).start()
        try:
            yield way
        finally:
            server.shutdown(socket.SHUT_RDWR)  # close alone does not wake the thread in accept


def _accept(server: socket.socket, worker: Worker, token: bytes) -> None:
    while True:
        try:
            sock, _ = server.accept()
        except OSError:
            return
        args = (Connection(sock.detach()), worker, token)
        threading.Thread(target=_answer, args=args, name="daskpytorch-data", daemon=True).start()


def _answer(connection: Connection, worker: Worker, token: bytes) -> None:
    with contextlib.closing(connection), contextlib.suppress(EOFError, OSError):  # the rank has gone
        # Nothing is unpickled before the token has proved who is there.
        if not secrets.compare_digest(connection.recv_bytes(len(token)), token):
            return
        match connection.recv():
            case _Sizes(keys):
                connection.send(_on_loop(worker, _sizes(worker, keys)))
            case _Get(key):
                _send(connection, _on_loop(worker, _find(worker, key)))


def _send(connection: Connection, found: list[Any] | _Missing | _Refused) -> None:
    if isinstance(found, list):
        try:
            data = cloudpickle.dumps(found.pop(), protocol=5)
        except Exception as error:  # whatever a user's own class may raise
            found = _Refused(
                f"a partition cannot be pickled: {type(error).__name__}: {error}. Let Dask make plain data."
            )
        else:
            connection.send(_Coming())
            connection.send_bytes(data)
            return
    connection.send(found)


def _on_loop(worker: Worker, coroutine: Any) -> Any:
    return asyncio.run_coroutine_threadsafe(coroutine, worker.loop.asyncio_loop).result()


async def _sizes(worker: Worker, keys: Sequence[Key]) -> dict[Key, int]:
    return {key: worker.state.tasks[key].nbytes or 0 for key in keys if key in worker.data}


async def _find(worker: Worker, key: Key) -> list[Any] | _Missing | _Refused:
    """The partition, in a list; it may be anything."""
    from distributed.utils_comm import gather_from_workers

    if key in worker.data:
        return [worker.data[key]]
    try:
        holders = (await worker.scheduler.who_has(keys=[key]))[key]
        data, _, failed, _ = await gather_from_workers({key: holders}, worker.rpc, who=worker.address)
        if key in data:
            return [data[key]]
        if failed:
            return _Refused(
                f"partition {key!r} cannot be pickled, or unpickled on {worker.address}: see the workers' logs"
            )
        return _Missing((await worker.scheduler.get_task_status(keys=[key]))[key])
    except OSError as error:  # the scheduler has gone, which ends the gang, or comes back
        return _Missing(f"out of sight: {error}")
