"""Starts a gang's agents on the workers of a Dask cluster. Runs in the driver; its `_serve` runs on the workers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from distributed import Client, KilledWorker, Worker, WorkerPlugin, get_worker, secede
from distributed import Future as DaskFuture
from distributed.comm import get_address_host
from distributed.core import Status
from distributed.deploy import SpecCluster
from distributed.utils import get_ip

from flytekitplugins.daskpytorch.dask import cluster, in_rank
from flytekitplugins.daskpytorch.errors import WorkerLostError
from flytekitplugins.daskpytorch.node import agent, fork_client, hardware
from flytekitplugins.daskpytorch.protocol import placement
from flytekitplugins.daskpytorch.protocol.messages import AgentOrder, OnFailure
from flytekitplugins.daskpytorch.protocol.placement import worker_order
from flytekitplugins.daskpytorch.settings import Gang

HOW_TO_GET_WORKERS = (
    "Start workers, or wait for them with client.wait_for_workers(n). An adaptive cluster starts none for a gang, "
    "nor for that wait: call client.cluster.adapt(minimum=n) or client.cluster.scale(n) before."
)
HostAndGpus = tuple[str, tuple[str, ...]]
AGENT_PRIORITY = 1_000
"""Dask's priority of an agent; other tasks have 0."""
LOOK_TIMEOUT = 2.0
"""Seconds for the scheduler to say which workers it has, to a gang that has other things to do and asks again."""
FIRST_LOOK_TIMEOUT = 30.0
"""The same for one that cannot begin without: a busy scheduler is none that is lost. Dask's own for connecting."""
NANNYS_TIME = 2.0
"""Seconds for a nanny to tell its worker to close, when both have SIGTERM."""
LEAVING = {status.name for status in (Status.closing, Status.closing_gracefully, Status.closed)}
GPUS_TIMEOUT = 30.0
"""Seconds for a worker to say which GPUs it has; where it has some, it starts a process with torch to know."""


class DaskAgents:
    """Starts a gang's agents on the workers of a Dask cluster, one each, pinned.

    On all of them or the first `num_workers`.
    """

    def __init__(self, client: Client, num_workers: int | None = None) -> None:
        if client.asynchronous:
            raise TypeError("dispatch needs a synchronous client: Client(..., asynchronous=False)")
        self._client = client
        self._futures: list[DaskFuture] = []
        self.scheduler: str = client.scheduler.address
        found = cluster.identity(client, FIRST_LOOK_TIMEOUT)
        self._addresses = _addresses(client, found)
        self._paused = _paused(found)
        made = client.cluster
        self._made_by_cluster = set(made.workers) if isinstance(made, SpecCluster) else set()
        self.workers: Sequence[str] = sorted(self._addresses, key=worker_order)[:num_workers]
        self.num_wanted: int = num_workers or len(self.workers)
        is_local = self.scheduler.startswith("inproc:")
        self.host: str = "127.0.0.1" if is_local else get_ip(get_address_host(self.scheduler))

    def launch(self, orders: Sequence[AgentOrder], on_failure: OnFailure) -> None:
        """Submit the agents."""
        for order in orders:
            address = self._addresses[order.worker]
            # Pinned, since Dask would give it to an idle worker; should the worker go, `lost_workers` says so, because
            # the task itself would wait for ever. Before all tasks that wait for a thread, since it needs none.
            future = self._client.submit(
                _serve,
                address,
                order,  # whole, since Dask logs the arguments of a task that fails, and it hides its token
                workers=[address],
                allow_other_workers=False,
                priority=AGENT_PRIORITY,
                pure=False,
                retries=0,
            )
            future.add_done_callback(lambda done, worker=order.worker: _report_failure(done, worker, on_failure))
            self._futures.append(future)

    def ranks_per_worker(self, gang: Gang) -> int:
        """Ranks on each worker: as the gang says, else one per GPU that they have, else one. Asks each worker once.

        Raises:
            ValueError: Some have more GPUs than others.
        """
        if gang.ranks_per_worker != "auto":
            return gang.ranks_per_worker
        known = _known_gpus.setdefault(self._client, {})
        addresses = {worker: self._addresses[worker] for worker in self.workers}
        if strangers := [address for address in addresses.values() if address not in known]:
            seconds = min(GPUS_TIMEOUT, gang.start_timeout)
            known |= self._client.sync(_ask_for_gpus, self._client, strangers, seconds)
        # Who does not answer may do so when its agent is started, or else is named then.
        return placement.one_per_gpu({w: known[address] for w, address in addresses.items() if address in known})

    @property
    def addresses(self) -> Mapping[str, str]:
        """What users call the workers -> their addresses, also of those that have gone."""
        return self._addresses

    def present(self) -> list[str]:
        """All the workers that the scheduler knows now.

        Raises:
            OSError: It does not answer, or the client has given it up.
        """
        try:
            found = self._client.sync(self._client.scheduler.identity, callback_timeout=LOOK_TIMEOUT)
        except (RuntimeError, AttributeError) as error:  # of a client that has closed itself, for want of a scheduler
            raise ConnectionError(f"the Dask client has closed itself: {error}") from error
        self._addresses |= (here := _addresses(self._client, found))
        self._paused = _paused(found)
        return list(here)

    def is_connected(self) -> bool:
        """Whether the scheduler is there, as far as the client knows."""
        return bool(self._client.status == "running")

    def hindrance(self) -> str:
        """Name workers that Dask has paused, and those that the client's own cluster has given up."""
        told = [
            f"Dask has paused {worker}, and starts nothing there: its process takes more than "
            "distributed.worker.memory.pause of its memory limit"
            for worker in self._paused
        ]
        made = self._client.cluster
        if isinstance(made, SpecCluster) and (
            given_up := self._made_by_cluster & set(made.worker_spec) - set(made.workers)
        ):
            names = ", ".join(sorted(map(str, given_up)))
            told.append(
                f"the cluster has given up its worker {names}, which was away for longer than "
                f"distributed.deploy.lost-worker-timeout or was lost again within that time, and will not start "
                f"another: client.cluster.scale({len(made.worker_spec)}) does"
            )
        return "".join(f"; {each}" for each in told)

    def close(self) -> None:
        """Forget the agents' tasks."""
        if self._client.status == "running":
            self._client.cancel(self._futures, force=True)
        self._futures.clear()


_known_gpus: WeakKeyDictionary[Client, dict[str, HostAndGpus]] = WeakKeyDictionary()
"""By the workers' addresses: hosts' names and GPUs."""


async def _ask_for_gpus(client: Client, addresses: Sequence[str], seconds: float) -> dict[str, HostAndGpus]:
    """What the workers answer that answer in time; one that is suspended does not keep the others' answers."""

    async def ask(address: str) -> dict[str, HostAndGpus]:
        with contextlib.suppress(Exception):  # whatever there is in the worker's image
            async with asyncio.timeout(seconds):
                answers: dict[str, HostAndGpus] = await client.run(hardware.host_and_gpus, workers=[address])
                return answers
        return {}

    answers = await asyncio.gather(*(ask(address) for address in addresses))
    return {address: found for answer in answers for address, found in answer.items()}


def _addresses(client: Client, scheduler: Mapping[str, Any]) -> dict[str, str]:
    """What users call the workers that stay -> their addresses. In-process ones have addresses without an order."""
    leaving = _scaled_away(client)
    return {
        f"local worker {info['name']}" if address.startswith("inproc:") else address: address
        for address, info in scheduler["workers"].items()
        if info["status"] not in LEAVING and info["name"] not in leaving
    }


def _paused(scheduler: Mapping[str, Any]) -> list[str]:
    return [address for address, info in scheduler["workers"].items() if info["status"] == Status.paused.name]


def _scaled_away(client: Client) -> set[object]:
    """Names of workers that the client's own cluster is about to take away, of which the scheduler may not know yet."""
    made = client.cluster
    return set(made.workers) - set(made.worker_spec) if isinstance(made, SpecCluster) else set()


def _serve(address: str, order: AgentOrder) -> None:
    here = get_worker()
    if here.address != address:
        raise RuntimeError(f"worker {address} was lost before it could start its ranks")
    if here.nanny is not None:
        fork_client.hand_over(here.nanny)
        _run_on(here, _end_as_the_nanny_says, here)
    secede()  # an agent only waits; it must not keep one of the worker's threads from other gangs and tasks
    with _farewell(here) as leaving, in_rank.served(here) as data:
        agent.run(order, leaving, data)


@contextlib.contextmanager
def _farewell(worker: Worker) -> Iterator[int]:
    """Notice that the worker is told to close: gives a file descriptor that becomes readable then.

    The worker puts its end off until the end of this context, as far as its nanny lets it (`dask worker` gives it 8 s).
    """
    farewell, name = _Farewell(), f"daskpytorch-{threading.get_ident()}"
    try:
        _run_on(worker, worker.plugin_add, farewell, name)
        yield farewell.readable
    finally:
        farewell.close()
        with contextlib.suppress(RuntimeError):  # the worker's loop has ended
            _run_on(worker, _remove_plugin, worker, name)


async def _remove_plugin(worker: Worker, name: str) -> None:
    if name in worker.plugins:  # else the worker is closing, and has removed it
        await worker.plugin_remove(name)


async def _end_as_the_nanny_says(worker: Worker) -> None:
    """Have a worker below a nanny wait for the nanny's word on SIGTERM, and leave Ctrl-C to it.

    Where both have the signal at once the nanny closes the worker in good order, and the ranks can save; by the signal
    itself they would go before. A worker that has it alone, as when Dask finds that it takes too much memory, ends by
    it after all, and the nanny brings another.
    """
    loop = asyncio.get_running_loop()

    def end() -> None:
        if worker.status not in (Status.closing, Status.closing_gracefully, Status.closed):
            loop.remove_signal_handler(signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)

    with contextlib.suppress(RuntimeError, ValueError):  # its loop is not the main thread's, which hears of signals
        loop.add_signal_handler(signal.SIGTERM, lambda: loop.call_later(NANNYS_TIME, end))
        signal.signal(signal.SIGINT, lambda *_: None)  # ignored, it would be so by what is started here


class _Farewell(WorkerPlugin):  # type: ignore[misc]
    def __init__(self) -> None:
        self.readable, self._writable = os.pipe()
        self._lock = threading.Lock()  # nothing is written once the pipe is closed: its number may be another file's
        self._done = threading.Event()

    async def teardown(self, worker: Worker) -> None:
        """Called when the worker closes, and when the agent has ended."""
        with self._lock:
            if self._done.is_set():
                return
            os.write(self._writable, b".")
        # By a second Ctrl-C it is cancelled, or there are no more threads: Dask would log either as an error of ours.
        with contextlib.suppress(asyncio.CancelledError, RuntimeError):
            await asyncio.to_thread(self._done.wait)

    def close(self) -> None:
        with self._lock:
            self._done.set()
            os.close(self.readable)
            os.close(self._writable)


def _run_on(worker: Worker, coroutine: Callable[..., Any], *args: Any) -> None:
    """Have a coroutine run on the worker's event loop, in order, from a task's thread.

    Not waited for: a worker with other things to do would make a gang fail that needs nothing of it.
    """
    asyncio.run_coroutine_threadsafe(coroutine(*args), worker.loop.asyncio_loop)


def _report_failure(done: DaskFuture, worker: str, on_failure: OnFailure) -> None:
    if done.status == "error":
        error = done.exception()
        if isinstance(error, KilledWorker):  # as Dask has it; the worker may come back
            error = WorkerLostError(f"the worker ended while its agent started: {error}", worker=worker)
        on_failure(worker, error if isinstance(error, Exception) else RuntimeError(str(error)))
    elif done.status in ("cancelled", "lost"):
        on_failure(worker, RuntimeError("the scheduler was lost"))
