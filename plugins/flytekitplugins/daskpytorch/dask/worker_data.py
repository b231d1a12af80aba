"""What a Dask worker holds, for the ranks beside it: the worker's end.

A rank asks its own worker, which knows its cluster: where else a partition is, and how to get it from there, by TLS or
within one process. What passes between two workers passes through neither the scheduler nor the driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import cloudpickle

from flytekitplugins.daskpytorch.protocol.worker_data import (
    Contact,
    Key,
    WorkerData,
    _Coming,
    _Find,
    _Get,
    _Missing,
    _Refused,
    _Sizes,
)

if TYPE_CHECKING:
    from distributed import Worker


GUIDE = "flytekitplugins.daskpytorch.dask.in_rank"


@contextlib.contextmanager
def served(worker: Worker) -> Iterator[WorkerData]:
    """Answer ranks until the end of this context; gives what they need to ask."""
    way = WorkerData(
        address=f"\0daskpytorch-{os.getpid()}-{secrets.token_hex(8)}", token=secrets.token_bytes(32), guide=GUIDE
    )
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(way.address)
        server.listen(128)
        args = (server, worker, way.token)
        threading.Thread(target=_accept, args=args, name="daskpytorch-data", daemon=True).start()
        try:
            yield way
        finally:
            server.shutdown(socket.SHUT_RDWR)  # close alone does not wake the thread in accept


_finding = threading.Lock()
"""Two ranks may ask at the same time."""


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
            case _Find():
                with _finding:
                    contact = _on_loop(worker, _contact(worker))
                connection.send(contact)
            case _Get(key):
                _send(connection, _on_loop(worker, _find(worker, key)))


def _send(connection: Connection, found: list[Any] | _Missing | _Refused) -> None:
    if isinstance(found, list):
        try:
            data = cloudpickle.dumps(found.pop(), protocol=5)
        except BaseException as error:  # whatever a user's own class may raise
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


async def _contact(worker: Worker) -> Contact:
    address = worker.scheduler.address
    is_local = address.startswith("inproc:")
    return Contact(
        name=worker.name,
        address=worker.address,
        scheduler=await _address_for_others(address) if is_local else address,
        reaches_workers=not is_local,
        security=worker.security,
    )


async def _address_for_others(address: str) -> str:
    """Where other processes of this machine find a scheduler of this process; it listens there once somebody asks."""
    from distributed import Scheduler

    [scheduler] = [each for each in Scheduler._instances if each.address == address]  # noqa: SLF001
    if len(scheduler.listeners) == 1:
        await scheduler.listen("tcp://127.0.0.1:0", **scheduler.security.get_listen_args("scheduler"))
    return str(scheduler.listeners[-1].contact_address)


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
