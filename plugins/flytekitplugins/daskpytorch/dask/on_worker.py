"""Runs a gang's agent on a Dask worker, and ends the agent before the worker. Runs in a Dask worker."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from distributed import Worker, WorkerPlugin, get_worker, secede
from distributed.core import Status

from flytekitplugins.daskpytorch.node import agent
from flytekitplugins.daskpytorch.protocol.host import AgentOrder
from flytekitplugins.daskpytorch.protocol.job import WorkerData

NANNYS_TIME = 2.0
"""Seconds after SIGTERM for the nanny's order to close, without which the worker ends."""


def serve(address: str, order: AgentOrder) -> None:
    """Run a gang's agent as a Dask task.

    RuntimeError: Dask runs it on another worker, as the one at `address` was lost.
    """
    here = get_worker()
    if here.address != address:
        raise RuntimeError(f"the worker at {address} was lost before it could start its ranks")
    if here.nanny is not None:
        _run_on(here, _delay_sigterm_for_nanny, here)
    secede()  # an agent mostly waits, and must not take a worker's thread from other gangs and tasks
    data = WorkerData(worker=here.address, scheduler=here.scheduler.address, security=pickle.dumps(here.security))
    with _close_signal(here) as leaving:
        agent.run(order, leaving, data)


@contextlib.contextmanager
def _close_signal(worker: Worker) -> Iterator[int]:
    """Yield a file descriptor that becomes readable when the worker begins to close.

    The worker delays its end until the end of this context, as long as its nanny waits (8 s with `dask worker`).
    """
    close_signal, name = _CloseSignal(), f"daskpytorch-{threading.get_ident()}"
    try:
        _run_on(worker, worker.plugin_add, close_signal, name)
        yield close_signal.readable
    finally:
        close_signal.close()
        with contextlib.suppress(RuntimeError):  # the worker's loop has ended
            _run_on(worker, _remove_plugin, worker, name)


async def _remove_plugin(worker: Worker, name: str) -> None:
    if name in worker.plugins:  # a closing worker has removed the plugin already
        await worker.plugin_remove(name)


async def _delay_sigterm_for_nanny(worker: Worker) -> None:
    """Make a worker under a nanny wait on SIGTERM for the nanny's order to close, and ignore Ctrl-C.

    If both receive SIGTERM, the nanny closes the worker in good order, and the ranks can save a checkpoint. A worker
    alone, as beyond Dask's memory limit, ends after two seconds.
    """
    loop = asyncio.get_running_loop()

    def end() -> None:
        if worker.status not in (Status.closing, Status.closing_gracefully, Status.closed):
            loop.remove_signal_handler(signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)

    with contextlib.suppress(RuntimeError, ValueError):  # signals need a loop in the main thread
        loop.add_signal_handler(signal.SIGTERM, lambda: loop.call_later(NANNYS_TIME, end))
        signal.signal(signal.SIGINT, lambda *_: None)  # SIG_IGN would be inherited by child processes


class _CloseSignal(WorkerPlugin):  # type: ignore[misc]
    def __init__(self) -> None:
        self.readable, self._writable = os.pipe()
        self._lock = threading.Lock()  # prevents writes to a closed descriptor, which another file may reuse
        self._done = threading.Event()

    async def teardown(self, worker: Worker) -> None:
        """Wait for the agent's end when the worker closes.

        Dask also calls this when the plugin is removed after that end.
        """
        with self._lock:
            if self._done.is_set():
                return
            os.write(self._writable, b".")
        # A second Ctrl-C cancels the wait, or no thread is left. Dask would log either as an error of this plugin.
        with contextlib.suppress(asyncio.CancelledError, RuntimeError):
            await asyncio.to_thread(self._done.wait)

    def close(self) -> None:
        with self._lock:
            self._done.set()
            os.close(self.readable)
            os.close(self._writable)


def _run_on(worker: Worker, coroutine: Callable[..., Any], *args: Any) -> None:
    """Run a coroutine on the worker's event loop, in call order, without a wait, since the loop may be busy."""
    asyncio.run_coroutine_threadsafe(coroutine(*args), worker.loop.asyncio_loop)
