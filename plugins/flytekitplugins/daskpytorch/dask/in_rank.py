"""Dask's own functions in a rank: `get_client`, `get_worker`, and all that asks them. Imported there once Dask is.

A rank is no task of Dask: what it runs in is another process than the worker's.
"""

from __future__ import annotations

import functools
import os
import threading
from typing import TYPE_CHECKING, Any

from flytekitplugins.daskpytorch.protocol.worker_data import Contact, WorkerData

if TYPE_CHECKING:
    from distributed import Client


def enter(distributed: Any, way: WorkerData) -> None:
    """Have Dask's functions answer in a rank as they do in a task; called when `distributed` has just been imported."""
    ours, get_worker = RankWorker(way), distributed.get_worker

    @functools.wraps(get_worker)
    def get_worker_or_ours() -> Any:
        try:
            return get_worker()  # of a cluster that was made in the rank
        except ValueError:
            return ours

    distributed.get_worker = distributed.worker.get_worker = get_worker_or_ours
    _bind_late(distributed.Future, ours)


def _bind_late(future_type: Any, ours: RankWorker) -> None:
    """Have futures that came with the arguments find their client when they are asked for something, and not before."""
    client, release = future_type.client.fget, future_type.release

    def bound_client(future: Any) -> Any:
        if client(future) is None:
            future.bind_client(ours.client)
            ours.client._inform_scheduler_of_futures()  # noqa: SLF001 - as for data sets
        return client(future)

    def release_if_bound(future: Any) -> None:
        if client(future) is not None:
            release(future)

    future_type.client, future_type.release = property(bound_client), release_if_bound


class RankWorker:
    """The Dask worker that carries this rank, as far as other processes know it; its client is made when asked for."""

    def __init__(self, way: WorkerData) -> None:
        self._way = way
        self._lock = threading.Lock()
        self._clients: dict[int, Client] = {}
        """By process: a fork of the rank, as a worker of a DataLoader, cannot use the rank's."""

    @property
    def name(self) -> Any:
        """As the worker is called."""
        return self._contact.name

    @property
    def address(self) -> str:
        """The worker's."""
        return self._contact.address

    @property
    def client(self) -> Client:
        """One of the rank's own, to the worker's scheduler."""
        return self._get_client()

    @property
    def scheduler(self) -> Any:
        """The client's way to it."""
        return self.client.scheduler

    @property
    def loop(self) -> Any:
        """The client's."""
        return self.client.loop

    @functools.cached_property
    def _contact(self) -> Contact:
        return self._way.contact()

    def _get_client(self, timeout: float | None = None) -> Client:
        """What `distributed.get_client` calls."""
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
