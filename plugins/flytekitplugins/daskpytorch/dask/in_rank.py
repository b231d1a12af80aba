"""Dask in a rank: `get_client`, `get_worker` and their callers, and the partitions of a `DaskPartitions`.

A rank runs outside the worker's process, and is no Dask task. `served` answers its questions in the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import pickle
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flytekitplugins.daskpytorch.protocol.job import Key, WorkerData

if TYPE_CHECKING:
    from distributed import Client, Scheduler, Worker


FIRST_PAUSE = 0.05
LONGEST_PAUSE = 1.0
TOKEN_TIMEOUT = 10.0


# ---- In the rank


def enter(distributed: Any, way: WorkerData) -> None:
    """Make Dask's `get_worker` and futures work in a rank as in a Dask task."""
    ours, get_worker = worker_of(way), distributed.get_worker

    @functools.wraps(get_worker)
    def get_worker_or_ours() -> Any:
        try:
            return get_worker()  # a worker of the rank's own cluster
        except ValueError:
            return ours

    distributed.get_worker = distributed.worker.get_worker = get_worker_or_ours
    _bind_late(distributed.Future, ours)


def _bind_late(future_type: Any, ours: RankWorker) -> None:
    """Make Dask futures among the function's arguments find the rank's Dask client at their first use, not before."""
    client, release = future_type.client.fget, future_type.release

    def bound_client(future: Any) -> Any:
        if client(future) is None:
            future.bind_client(ours.client)
            ours.client._inform_scheduler_of_futures()  # noqa: SLF001 - Dask does so for data sets
        return client(future)

    def release_if_bound(future: Any) -> None:
        if client(future) is not None:
            release(future)

    future_type.client, future_type.release = property(bound_client), release_if_bound


@functools.cache
def worker_of(way: WorkerData) -> RankWorker:
    return RankWorker(way)


class RankWorker:
    """Stand-in for the Dask worker beside this rank. Its Dask client is made at the first use."""

    def __init__(self, way: WorkerData) -> None:
        self._way = way
        self._lock = threading.Lock()
        self._clients: dict[int, Client] = {}
        """By process ID, as forks of the rank, such as DataLoader workers, cannot use the rank's client."""

    @property
    def name(self) -> Any:
        return self._contact.name

    @property
    def address(self) -> str:
        return self._contact.address

    @property
    def client(self) -> Client:
        return self._get_client()

    @property
    def scheduler(self) -> Any:
        return self.client.scheduler

    @property
    def loop(self) -> Any:
        return self.client.loop

    def sizes(self, keys: Sequence[Key]) -> dict[Key, int]:
        holders = self.client.sync(self.scheduler.who_has, keys=keys)
        here = [key for key, addresses in holders.items() if self.address in addresses]
        sizes: dict[Key, int] = self.client.nbytes(here, summary=False)
        return sizes

    def fetch(self, key: Key) -> Any:
        """Return a partition. Wait while Dask is computing a lost one again.

        Dask's `Future` would wait for ever for lost scattered or unpicklable partitions. Here they raise LookupError
        and TypeError. OSError: the scheduler does not answer.
        """
        pause = FIRST_PAUSE
        while not (found := self.client.sync(self._find, key)):
            _check_coming(key, self.client.sync(self.scheduler.get_task_status, keys=[key])[key])
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return found.pop()

    async def _find(self, key: Key) -> list[Any]:
        from distributed.utils_comm import gather_from_workers

        if not self._contact.reaches_workers:
            answer = await self.scheduler.gather(keys=[key])
            return list(answer.get("data", {}).values())
        holders = await self.scheduler.who_has(keys=[key])
        data, _, failed, _ = await gather_from_workers(holders, self.client.rpc)
        if failed:
            raise TypeError(
                f"partition {key!r} cannot be pickled by its worker, or cannot be unpickled in this rank. The logs of "
                "both have the error. Let the Dask task return plain data, such as NumPy arrays or pandas data frames."
            )
        return list(data.values())

    @functools.cached_property
    def _contact(self) -> Contact:
        try:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(self._way.address)
                sock.sendall(self._way.token)
                with sock.makefile("rb") as answer:
                    contact: Contact = pickle.load(answer)  # noqa: S301 - from our own worker
                    return contact
        except (EOFError, OSError) as error:
            raise ConnectionError(
                f"this rank's Dask worker does not answer: the worker is ending ({error}). See the worker's log"
            ) from error

    def _get_client(self, timeout: float | None = None) -> Client:
        import dask
        from distributed import Client

        with self._lock:
            if (client := self._clients.get(os.getpid())) is None:
                client = self._clients[os.getpid()] = Client(
                    self._contact.scheduler,
                    security=self._contact.security,
                    timeout=timeout or dask.config.get("distributed.comm.timeouts.connect"),
                    direct_to_workers=self._contact.reaches_workers,
                    name="rank",
                )
            return client


def _check_coming(key: Key, state: str | None) -> None:
    if state is None:
        raise LookupError(
            f"Dask no longer knows partition {key!r}. Likely causes: the partition was scattered data, which were lost "
            "with their worker, or the driver closed its client or released the futures before the gang had ended. Let "
            "Dask compute the data instead of scattering them, and keep client and futures until then."
        )
    if state == "erred":
        raise LookupError(
            f"partition {key!r} was lost with its worker, and Dask failed to compute it again. The workers' logs have "
            "the cause. If workers were lost several times, raise Dask's distributed.scheduler.allowed-failures."
        )


# ---- In the worker


@contextlib.contextmanager
def served(worker: Worker) -> Iterator[WorkerData]:
    way = WorkerData(
        address=f"\0daskpytorch-{os.getpid()}-{secrets.token_hex(8)}", token=secrets.token_bytes(32), guide=__name__
    )
    server = socket.socket(socket.AF_UNIX)
    server.bind(way.address)
    server.listen(128)
    answering = asyncio.run_coroutine_threadsafe(_answer(server, worker, way.token), worker.loop.asyncio_loop)
    try:
        yield way
    finally:
        answering.cancel()


async def _answer(server: socket.socket, worker: Worker, token: bytes) -> None:
    async def tell(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(EOFError, OSError):  # the rank has ended
            # Abstract sockets belong to the network namespace. With hostNetwork, any container may connect.
            async with asyncio.timeout(TOKEN_TIMEOUT):
                is_known = secrets.compare_digest(await reader.readexactly(len(token)), token)
            if is_known:
                writer.write(pickle.dumps(await _contact(worker)))
                await writer.drain()

    async with await asyncio.start_unix_server(tell, sock=server) as answering:
        await answering.serve_forever()


@dataclass(frozen=True, kw_only=True)
class Contact:
    name: Any
    address: str
    scheduler: str
    reaches_workers: bool
    security: Any = field(repr=False)


async def _contact(worker: Worker) -> Contact:
    address = worker.scheduler.address
    is_local = address.startswith("inproc:")
    return Contact(
        name=worker.name,
        address=worker.address,
        scheduler=await _address_for_others(worker) if is_local else address,
        reaches_workers=not is_local,
        security=worker.security,
    )


async def _address_for_others(worker: Worker) -> str:
    from distributed import Client

    how: Any = {"security": worker.security, "asynchronous": True, "set_as_default": False}
    async with Client(worker.scheduler.address, **how) as client:
        return str(await client.run_on_scheduler(_listen))


async def _listen(dask_scheduler: Scheduler) -> str:
    if len(dask_scheduler.listeners) == 1:
        await dask_scheduler.listen("tcp://127.0.0.1:0", **dask_scheduler.security.get_listen_args("scheduler"))
    return str(dask_scheduler.listeners[-1].contact_address)
