"""Dask in a rank: `get_client`, `get_worker` and their callers, and the partitions of a `DaskPartitions`.

A rank is no Dask task, as it runs outside the worker's process. The rank asks its worker for the cluster's addresses,
and `served` answers in the worker. Each rank makes its Dask client at first use.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from flytekitplugins.daskpytorch.process.system import is_of_this_user, optional
from flytekitplugins.daskpytorch.protocol.orders import Contact, Key, WorkerData

if TYPE_CHECKING:
    from distributed import Client, Scheduler, Worker


logger = logging.getLogger(__name__)
FIRST_PAUSE = 0.05
LONGEST_PAUSE = 1.0
"""Maximum number of seconds between two requests for a lost partition that Dask is computing again."""
NOTICE_TIME = 10.0
"""Seconds after which a rank logs that it waits for a partition of Dask."""
TOKEN_TIMEOUT = 10.0
"""Timeout, in seconds, for the token of a process that has connected."""


# ---- In the rank


def enter(distributed: Any, way: WorkerData) -> None:
    """Make Dask's `get_worker` and futures work in a rank as in a Dask task.

    Args:
        distributed: The module, which has just been imported.
        way: Socket and token with which the rank asks its worker for the cluster's addresses.
    """
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
    """Return the stand-in for this rank's Dask worker: the same object, with one client, at each call."""
    return RankWorker(way)


class RankWorker:
    """Stand-in for the Dask worker beside this rank. Its Dask client is made at the first use."""

    def __init__(self, way: WorkerData) -> None:
        self._way = way
        self._lock = threading.Lock()
        self._clients: dict[int, Client] = {}
        """Process ID -> Dask client. Forks of the rank, such as DataLoader workers, cannot use the rank's client."""

    @property
    def name(self) -> Any:
        """Dask name of the worker beside this rank."""
        return self._contact.name

    @property
    def address(self) -> str:
        """Dask address of the worker beside this rank."""
        return self._contact.address

    @property
    def client(self) -> Client:
        """Dask client of this process, connected to the worker's scheduler."""
        return self._get_client()

    @property
    def scheduler(self) -> Any:
        """The connection of this process's Dask client to the scheduler."""
        return self.client.scheduler

    @property
    def loop(self) -> Any:
        """The event loop of this process's Dask client."""
        return self.client.loop

    def sizes(self, keys: Sequence[Key]) -> dict[Key, int]:
        """Return the sizes, in bytes, of those of the partitions that the worker beside this rank holds."""
        holders = self.client.sync(self.scheduler.who_has, keys=keys)
        here = [key for key, addresses in holders.items() if self.address in addresses]
        sizes: dict[Key, int] = self.client.nbytes(here, summary=False)
        return sizes

    def fetch(self, key: Key) -> Any:
        """Return a partition from a worker that holds it. Wait while Dask is computing a lost partition again.

        Dask's `Future` would wait for ever for lost scattered partitions and unpicklable partitions.

        Raises:
            LookupError: No worker holds the partition, and Dask does not or cannot compute it.
            TypeError: The partition cannot be pickled, or unpickled here.
            OSError: The Dask scheduler does not answer.
        """
        notice_at, pause = time.monotonic() + NOTICE_TIME, FIRST_PAUSE
        while not (found := self.client.sync(self._find, key)):
            state = self.client.sync(self.scheduler.get_task_status, keys=[key])[key]
            _check_coming(key, state)
            if time.monotonic() >= notice_at:
                logger.warning(
                    "still waiting for Dask to compute the lost partition %r again (state: %s). Dask's dashboard and "
                    "the workers' logs show what holds up the partition's task",
                    key,
                    state,
                )
                notice_at = time.monotonic() + NOTICE_TIME
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return found.pop()

    async def _find(self, key: Key) -> list[Any]:
        """Return a list with the partition. Empty if no worker holds the partition now."""
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
        return self._way.contact()

    def _get_client(self, timeout: float | None = None) -> Client:
        """Return this process's Dask client. `distributed.get_client` calls this method."""
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
    """Answer ranks' requests for the Dask cluster's addresses. Yield the socket and token with which a rank asks."""
    way = WorkerData(
        address=f"\0daskpytorch-{os.getpid()}-{secrets.token_hex(8)}", token=secrets.token_bytes(32), guide=__name__
    )
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(way.address)
        server.listen(128)
        args = (server, worker, way.token)
        threading.Thread(target=_answer, args=args, name="daskpytorch-data", daemon=True).start()
        try:
            yield way
        finally:
            server.shutdown(socket.SHUT_RDWR)  # close alone would not wake the thread in accept


def _answer(server: socket.socket, worker: Worker, token: bytes) -> None:
    """Answer processes with the token one after the other, so that a Dask scheduler's listener starts only once."""
    while True:
        try:
            sock, _ = server.accept()
        except OSError:  # the agent has ended
            return
        with sock, optional("Telling a rank the addresses of its Dask cluster"):
            if is_of_this_user(sock) and _knows(sock, token):
                found = asyncio.run_coroutine_threadsafe(_contact(worker), worker.loop.asyncio_loop).result()
                with contextlib.closing(Connection(sock.detach())) as connection, contextlib.suppress(OSError):
                    connection.send(found)  # unless the rank has ended


def _knows(sock: socket.socket, token: bytes) -> bool:
    """Return True if the process at the other end of a socket sends the token.

    Abstract sockets belong to the network namespace. With hostNetwork, a process in any container may connect.
    """
    sock.settimeout(TOKEN_TIMEOUT)
    with contextlib.suppress(OSError):  # the rank has ended, or another process sends nothing
        is_known = secrets.compare_digest(sock.recv(len(token)), token)
        sock.settimeout(None)
        return is_known
    return False


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
    """Return the TCP address of the worker's scheduler, which is in this process."""
    from distributed import Client

    how: Any = {"security": worker.security, "asynchronous": True, "set_as_default": False}
    async with Client(worker.scheduler.address, **how) as client:
        return str(await client.run_on_scheduler(_listen))


async def _listen(dask_scheduler: Scheduler) -> str:
    """Return a scheduler's TCP address. At the first call, make the scheduler listen there."""
    if len(dask_scheduler.listeners) == 1:
        await dask_scheduler.listen("tcp://127.0.0.1:0", **dask_scheduler.security.get_listen_args("scheduler"))
    return str(dask_scheduler.listeners[-1].contact_address)
