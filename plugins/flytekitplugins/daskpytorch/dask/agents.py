"""Starts a gang's agents on the workers of a Dask cluster. Runs in the driver."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from distributed import Client, KilledWorker
from distributed import Future as DaskFuture
from distributed.comm import get_address_host
from distributed.core import Status
from distributed.deploy import SpecCluster
from distributed.utils import get_ip

from flytekitplugins.daskpytorch.dask import cluster
from flytekitplugins.daskpytorch.dask.on_worker import serve
from flytekitplugins.daskpytorch.errors import WorkerLostError
from flytekitplugins.daskpytorch.node import hardware
from flytekitplugins.daskpytorch.protocol import placement
from flytekitplugins.daskpytorch.protocol.host import AgentOrder, OnFailure
from flytekitplugins.daskpytorch.protocol.placement import title_of, worker_order
from flytekitplugins.daskpytorch.settings import Gang

HOW_TO_GET_WORKERS = (
    "Start workers, or wait for them with client.wait_for_workers(n). An adaptive cluster starts workers for tasks "
    "alone: call client.cluster.adapt(minimum=n) or client.cluster.scale(n) first."
)
GANG, EVALUATION = "gang", "evaluation"
HostAndGpus = tuple[str, tuple[str, ...]]
AGENT_NAME = "daskpytorch-agent"
AGENT_PRIORITY = 1_000
LOOK_TIMEOUT = 2.0
FIRST_LOOK_TIMEOUT = 30.0
LEAVING = {status.name for status in (Status.closing, Status.closing_gracefully, Status.closed)}


class Allotment:
    """Workers of a Dask cluster that several gangs divide: each is free, or held by one of them. Not thread-safe."""

    def __init__(self, workers: Iterable[str]) -> None:
        self.workers = set(workers)
        self._held: dict[Hashable, set[str]] = {}
        self._wanted: dict[Hashable, int] = {}

    @property
    def free(self) -> set[str]:
        return self.workers - self.in_use

    @property
    def num_free(self) -> int:
        return max(0, len(self.free) - sum(map(self.num_missing, self._held)))

    @property
    def in_use(self) -> set[str]:
        return set().union(*self._held.values())

    @property
    def has_holders(self) -> bool:
        return bool(self._held)

    def update(self, present: Iterable[str]) -> None:
        self.workers = set(present)
        for workers in self._held.values():
            workers.intersection_update(self.workers)

    def acquire(self, holder: Hashable, count: int) -> list[str] | None:
        if count > self.num_free:
            return None
        self.hold(holder, (), count)
        return self.refill(holder)

    def hold(self, holder: Hashable, workers: Iterable[str], count: int) -> None:
        self._held[holder], self._wanted[holder] = set(workers), count

    def held(self, holder: Hashable) -> set[str]:
        return self._held[holder]

    def refill(self, holder: Hashable, num_left: int = 0) -> list[str]:
        spare = sorted(self.free, key=worker_order)[num_left:]
        self._held[holder].update(spare[: self.num_missing(holder)])
        return sorted(self._held[holder], key=worker_order)

    def release(self, holder: Hashable) -> None:
        del self._held[holder], self._wanted[holder]

    def num_missing(self, holder: Hashable) -> int:
        return max(0, self._wanted[holder] - len(self._held[holder]))


class DaskAgents:
    """Starts an agent on each of `num_workers` workers (None: all) of a Dask cluster: those with the fewest gangs.

    `num_kept` workers are kept for gangs that evaluate beside this one. 0: they share one. None: there are none.
    """

    _refill: Callable[[], list[str]] | None = None

    def __init__(self, client: Client, num_workers: int | None = None, num_kept: int | None = None) -> None:
        if client.asynchronous:
            raise TypeError("dispatch needs a synchronous client: Client(..., asynchronous=False)")
        self._client = client
        self._futures: list[DaskFuture] = []
        self.scheduler: str = client.scheduler.address
        self.addresses: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._note(cluster.identity(client, FIRST_LOOK_TIMEOUT))
        self.workers: Sequence[str] = sorted(self.addresses, key=worker_order)
        self._num_kept = num_kept
        if num_workers is None and num_kept:
            num_workers = len(self.workers)
        if num_workers is not None:
            self.workers = self._take(num_workers, num_kept or 0)
            num_workers = max(0, num_workers - (num_kept or 0))
        self.num_wanted: int = num_workers or len(self.workers)
        is_local = self.scheduler.startswith("inproc:")
        self.host: str = "127.0.0.1" if is_local else get_ip(get_address_host(self.scheduler))

    def _take(self, num_workers: int, num_kept: int) -> list[str]:
        agents = self._num_agents() if num_workers < len(self.workers) else {}
        with _lock:
            held = self._held_by_others()
            used = {each: (max(agents.get(each, 0), held[each]), worker_order(each)) for each in self.workers}
            taken = sorted(used, key=used.__getitem__)[:num_workers]
            count = max(0, num_workers - num_kept)
            _allotments[self] = allotment = Allotment(taken)
            allotment.hold(GANG, taken[:count], count)
            allotment.hold(EVALUATION, taken[count:], num_kept)
            return allotment.refill(GANG)

    def launch(self, orders: Sequence[AgentOrder], on_failure: OnFailure) -> None:
        """A spare worker that another launcher has taken since `present` counts as lost."""
        taken: Collection[str] = ()
        with _lock:
            if (allotment := _allotments.get(self)) is not None:
                taken = self._held_by_others().keys() - allotment.in_use
                allotment.held(GANG).update(order.worker for order in orders if order.worker not in taken)
        for order in orders:
            if order.worker in taken:
                on_failure(order.worker, WorkerLostError("another gang has taken the worker", worker=order.worker))
                continue
            address = self.addresses[order.worker]
            # The task is pinned, since Dask would give it to an idle worker. A pinned task waits for ever if its worker
            # is lost, so the driver watches the workers. The priority is high, as an agent needs no thread for long.
            future = self._client.submit(
                serve,
                address,
                order,  # Dask logs a failed task's arguments, and the order's repr hides the token
                workers=[address],
                allow_other_workers=False,
                key=f"{AGENT_NAME}-{uuid.uuid4().hex}",
                priority=AGENT_PRIORITY,
                pure=False,
                retries=0,
            )
            future.add_done_callback(lambda done, worker=order.worker: _report_failure(done, worker, on_failure))
            self._futures.append(future)

    def ranks_per_worker(self, gang: Gang) -> int:
        """Return the gang's setting, else one per GPU, else one. ValueError: workers have different numbers of GPUs.

        Workers that the gang does not take count, too, since they divide a host's GPUs with the others.
        """
        if gang.ranks_per_worker != "auto":
            return gang.ranks_per_worker
        known = _known_gpus.setdefault(self._client, {})
        addresses = self.addresses
        if strangers := [address for address in addresses.values() if address not in known]:
            seconds = min(FIRST_LOOK_TIMEOUT, gang.start_timeout)
            known |= self._client.sync(_ask_for_gpus, self._client, strangers, seconds)
        # A silent worker may answer when its agent starts. Otherwise an error names the worker then.
        return placement.one_per_gpu({w: known[address] for w, address in addresses.items() if address in known})

    def present(self) -> list[str]:
        """Return the workers that the gang may use now.

        OSError: the scheduler does not answer, or the client has closed itself.
        """
        if self._refill is not None:
            return self._refill()
        try:
            found = self._client.sync(self._client.scheduler.identity, callback_timeout=LOOK_TIMEOUT)
        except (RuntimeError, AttributeError) as error:  # the client has closed itself after the scheduler's loss
            raise ConnectionError(
                f"the Dask client has closed itself, probably after the loss of the scheduler: {error}. Check that the "
                "scheduler runs, and make a new Client"
            ) from error
        here = self._note(found)
        with _lock:
            if (allotment := _allotments.get(self)) is None:
                return list(here)
            allotment.update(here.keys() - (self._held_by_others().keys() - allotment.in_use))
            return [worker for worker in here if worker in allotment.workers - allotment.held(EVALUATION)]

    def share(self, workers: Sequence[str], refill: Callable[[], list[str]]) -> DaskAgents:
        launcher = copy.copy(self)
        own = {"_futures": [], "_refill": refill}  # `close` ends only that gang's agents
        vars(launcher).update(workers=workers, num_wanted=len(workers), **own)
        return launcher

    def beside(self) -> DaskAgents | None:
        """Return a launcher for a gang that evaluates: on the kept workers that are present, or on one of the gang's.

        Spare workers replace lost kept ones, after the lost workers of the launcher's own gang.
        """
        if self._num_kept is None:
            return None
        chosen: list[str] = []

        def refill() -> list[str]:
            chosen[:] = self._workers_beside(chosen)
            return list(chosen)

        workers = refill()
        return self.share(workers, refill) if workers else None

    def _workers_beside(self, chosen: Sequence[str]) -> list[str]:
        present = self.present()
        if not self._num_kept:
            wanted = (*chosen, *self.workers, *present)
            return [worker for worker in wanted if worker in present][:1]
        with _lock:
            allotment = _allotments[self]
            return allotment.refill(EVALUATION, allotment.num_missing(GANG))

    def _held_by_others(self) -> Counter[str]:
        others = [other for other in _allotments if other is not self and other.scheduler == self.scheduler]
        return Counter(worker for other in others for worker in _allotments[other].in_use)

    def _num_agents(self) -> Mapping[str, int]:
        ask = self._client.scheduler.processing
        running = self._client.sync(ask, workers=None, callback_timeout=FIRST_LOOK_TIMEOUT)
        keys = {worker: map(str, running.get(address, ())) for worker, address in self.addresses.items()}
        return {worker: sum(key.startswith(AGENT_NAME) for key in keys[worker]) for worker in keys}

    def is_connected(self) -> bool:
        return bool(self._client.status == "running")

    def title(self, worker: str) -> str:
        return title_of(worker, self._names.get(worker, worker))

    def _note(self, scheduler: Mapping[str, Any]) -> Mapping[str, str]:
        """Return the addresses of workers that are not closing.

        Names of in-process ones, unlike addresses, have an order.
        """
        workers, made = scheduler["workers"].items(), self._client.cluster
        leaving = set(made.workers) - set(made.worker_spec) if isinstance(made, SpecCluster) else set()
        self._names |= {address: info["name"] for address, info in workers if isinstance(info["name"], str)}
        here = {
            f"local worker {info['name']}" if address.startswith("inproc:") else address: address
            for address, info in workers
            if info["status"] not in LEAVING and info["name"] not in leaving
        }
        self.addresses |= here
        return here

    def close(self) -> None:
        with _lock:
            _allotments.pop(self, None)
        if self._client.status == "running":
            self._client.cancel(self._futures, force=True)
        self._futures.clear()


_lock = threading.Lock()
_allotments: WeakKeyDictionary[DaskAgents, Allotment] = WeakKeyDictionary()
_known_gpus: WeakKeyDictionary[Client, dict[str, HostAndGpus]] = WeakKeyDictionary()


async def _ask_for_gpus(client: Client, addresses: Sequence[str], seconds: float) -> dict[str, HostAndGpus]:

    async def ask(address: str) -> dict[str, HostAndGpus]:
        with contextlib.suppress(Exception):  # a worker's image may raise any exception
            async with asyncio.timeout(seconds):
                answers: dict[str, HostAndGpus] = await client.run(hardware.host_and_gpus, workers=[address])
                return answers
        return {}

    answers = await asyncio.gather(*(ask(address) for address in addresses))
    return {address: found for answer in answers for address, found in answer.items()}


def _report_failure(done: DaskFuture, worker: str, on_failure: OnFailure) -> None:
    if done.status == "error":
        error = done.exception()
        if isinstance(error, KilledWorker):  # Dask gives up, but a new worker may come
            error = WorkerLostError(f"the worker ended while its agent started: {error}", worker=worker)
        on_failure(worker, error if isinstance(error, Exception) else RuntimeError(str(error)))
    elif done.status in ("cancelled", "lost"):
        on_failure(worker, WorkerLostError("the scheduler was lost", worker=worker))  # the driver looks for it next
