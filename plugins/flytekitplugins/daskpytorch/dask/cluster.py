"""Connects a task to its Dask cluster: the backend's, or a local one made in the driver's process."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dask
from dask.system import cpu_count
from distributed import Client, LocalCluster, Worker
from distributed.comm import connect
from distributed.security import Security

from flytekitplugins.daskpytorch.errors import GangStartError
from flytekitplugins.daskpytorch.process.streams import say
from flytekitplugins.daskpytorch.protocol.host import current_execution
from flytekitplugins.daskpytorch.settings import SCHEDULER_VARIABLE, is_local

LOOPBACK = "127.0.0.1"
POLL_INTERVAL = 0.1
CONNECT_TIMEOUT = 10.0
SETTLE_TIME = 30.0
"""Seconds without a new worker after which `min_workers` suffice."""
NOTICE_INTERVAL = 10.0

QUIET = {
    "admin": {"tick": {"interval": "1s"}},
    "diagnostics": {"nvml": False},
    "worker": {"profile": {"enabled": False}},
}
"""Dask's profiler and tick take a tenth of a core from the ranks. Pods have the same settings (see `task`)."""

_clients: list[Client] = []


def current_client() -> Client:
    """Return the client of the cluster that this `DaskCluster` task runs on.

    Raises:
        RuntimeError: Called outside a `DaskCluster` task.

    Examples:
        >>> from flytekit import task
        >>> from flytekitplugins.daskpytorch import DaskCluster, current_client
        >>> @task(task_config=DaskCluster())
        ... def lengths(names: list[str]) -> list[int]:
        ...     client = current_client()
        ...     return client.gather(client.map(len, names))
        >>> lengths(names=["Bello", "Mia"])
        [5, 3]
    """
    if not _clients:
        raise RuntimeError(
            "no Dask client here: current_client() works inside a task with task_config=DaskCluster(...). In a rank "
            "use current_rank(); elsewhere make a distributed.Client yourself."
        )
    return _clients[-1]


@contextlib.contextmanager
def opened(
    *, num_workers: int, min_workers: int | None = None, start_timeout: float = 600.0, source: str | None = None
) -> Iterator[Client]:
    """Yield a client of the task's Dask cluster once the workers are there. GangStartError: too few came in time.

    In a local run, the workers are threads of this process, which start in 50 ms, and the cluster listens only on the
    loopback interface. `source` names the setting with the scheduler's address, for messages.
    """
    deadline = time.monotonic() + start_timeout
    with contextlib.ExitStack() as stack:
        if is_local():
            client, place = stack.enter_context(_local_client(num_workers)), "this machine"
        else:
            address = os.environ[SCHEDULER_VARIABLE]
            place = f"{address} ({source or _source()})"
            client = stack.enter_context(_connected(address, place, deadline))
        least = min_workers or num_workers
        _wait_for_workers(client, place, num_workers, least, deadline, start_timeout)
        _clients.append(client)
        stack.callback(_clients.remove, client)
        yield client


def greet(address: str, seconds: float) -> None:
    """Raise OSError or ValueError unless a scheduler answers.

    A `Client` would wait for ever for a silent process there.
    """

    async def say_hello() -> None:
        try:
            async with asyncio.timeout(seconds):
                comm = await connect(address, 0.8 * seconds, **Security().get_connection_args("client"))
        except TimeoutError as error:
            raise TimeoutError(
                f"the process there accepts connections, but did not answer as a scheduler within {seconds:g} s"
            ) from error
        await comm.close()

    with ThreadPoolExecutor(1) as thread:  # the caller's thread may run an event loop
        thread.submit(lambda: asyncio.run(say_hello())).result()


def identity(client: Client, seconds: float) -> Mapping[str, Any]:
    """Raise GangStartError if the scheduler does not answer in time."""
    try:
        found: Mapping[str, Any] = client.sync(client.scheduler.identity, callback_timeout=seconds)
    except TimeoutError as error:
        raise GangStartError(
            f"the Dask scheduler at {client.scheduler.address} is connected, but did not say within {seconds:.1f} s "
            "which workers it has. The scheduler may be busy or suspended: see its log and its pod's CPU limit."
        ) from error
    return found


@contextlib.contextmanager
def _local_client(num_workers: int) -> Iterator[Client]:
    usual, config = dask.config.merge(*dask.config.defaults), dask.config.merge(dask.config.config)
    dask.config.update(config, {"distributed": QUIET}, priority="new-defaults", defaults=usual)  # the user's win
    with dask.config.set(distributed=config["distributed"]):
        local = LocalCluster(
            n_workers=num_workers,
            threads_per_worker=max(1, cpu_count() // num_workers),
            processes=False,
            memory_limit=0,  # the workers share this process, and each would count all its memory
            dashboard_address=f"{LOOPBACK}:0",  # the HTTP server always starts, and the default port may be taken
            scheduler_kwargs={"dashboard": False},
            worker_class=_local_worker,
        )
    with local, Client(local) as client:
        yield client


def _local_worker(*args: Any, **options: Any) -> Worker:
    """Make the HTTP server, which always starts, listen on the loopback interface only."""
    return Worker(*args, **options | {"dashboard_address": f"{LOOPBACK}:0", "dashboard": False})


def _source() -> str:
    is_on_backend = current_execution().name not in (None, "local")
    return SCHEDULER_VARIABLE if is_on_backend else f"{SCHEDULER_VARIABLE}: unset it to train on this machine"


@contextlib.contextmanager
def _connected(address: str, place: str, deadline: float) -> Iterator[Client]:
    """Connect with retries, since scheduler and DNS name may appear later than this task."""
    notice = _Notice()
    while True:
        left = deadline - time.monotonic()
        patience = max(0.1, min(left, CONNECT_TIMEOUT))
        try:
            greet(address, patience)
            client = Client(address, timeout=patience)
            break
        except (OSError, TimeoutError) as error:
            if time.monotonic() + 1.0 >= deadline:
                raise GangStartError(
                    f"no Dask scheduler answered at {place} in time: {error}. "
                    "See the scheduler pod's log. Likely causes: its image lacks this package, and so the command that "
                    "Flyte starts (Flyte 1: dask-scheduler, Flyte 2: dask scheduler); or its TLS settings differ from "
                    "this task's (DASK_DISTRIBUTED__COMM__...)."
                ) from error
            notice.give(f"waiting for the Dask scheduler at {place}")
            time.sleep(min(1.0, max(0.0, left)))
    with client:
        yield client


def _wait_for_workers(
    client: Client, place: str, wanted: int, least: int, deadline: float, start_timeout: float
) -> None:
    notice = _Notice()
    here, newest_at = -1, time.monotonic()
    while True:
        now = time.monotonic()
        if (count := len(identity(client, max(1.0, deadline - now))["workers"])) != here:
            here, newest_at = count, now
        if here >= wanted:
            return
        if here >= least and (now - newest_at >= SETTLE_TIME or now >= deadline):
            say(f"going on with {here} of {wanted} Dask workers (at least {least} were asked for)", logging.INFO)
            return
        if now >= deadline:
            raise GangStartError(
                f"{here} of {wanted} Dask workers came to {place} within {start_timeout:g} s; "
                f"{least} are needed. Likely causes: the worker pods are still pending (kubectl get pods; GPUs, spot "
                "capacity, tolerations), their image cannot be pulled, or their image lacks this package, and so the "
                "command that Flyte starts (Flyte 1: dask-worker, Flyte 2: dask worker). Raise Gang(start_timeout=...) "
                "if they only need longer."
            )
        notice.give(f"{here} of {wanted} Dask workers are at {place}, waiting for the others")
        time.sleep(POLL_INTERVAL)


class _Notice:
    def __init__(self) -> None:
        self._due_at = time.monotonic() + 2.0

    def give(self, text: str) -> None:
        if time.monotonic() >= self._due_at:
            say(text)
            self._due_at = time.monotonic() + NOTICE_INTERVAL
