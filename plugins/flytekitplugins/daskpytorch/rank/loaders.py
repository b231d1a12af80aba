"""Makes the workers of a rank's DataLoaders ignore SIGTERM, so that only the rank ends them.

Runs in ranks and in the workers.
"""

import atexit
import functools
import multiprocessing
import os
import threading
import weakref
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

from torch.utils.data import DataLoader

from flytekitplugins.daskpytorch.process import signals

PRELOADED = f"{__package__}.loaders_preload"

_set_preloaded = forkserver.set_forkserver_preload
_preloaded = ["__main__"]
"""Modules that `multiprocessing`'s fork server imports ahead. The first value is Python's default."""
_workers: weakref.WeakSet[BaseProcess] = weakref.WeakSet()
"""DataLoader workers of this process that may still run."""
_iterating = threading.local()
"""`pid`: this process's id while this thread runs `DataLoader.__iter__`, which starts the workers."""


def shield() -> None:
    """Patch `DataLoader` in this process, so that all its workers ignore SIGTERM, with any start method."""
    iterate, start = DataLoader.__iter__, BaseProcess.start

    @functools.wraps(iterate)
    def iterate_shielded(loader: DataLoader[Any]) -> Any:
        if not loader.num_workers:
            return iterate(loader)
        _start_forerunners((loader.multiprocessing_context or multiprocessing).get_start_method())
        given, before = loader.worker_init_fn, getattr(_iterating, "pid", None)
        loader.worker_init_fn, _iterating.pid = functools.partial(_begin, given), os.getpid()
        try:
            return iterate(loader)
        finally:
            loader.worker_init_fn, _iterating.pid = given, before

    @functools.wraps(start)
    def start_shielded(process: BaseProcess) -> None:
        # Torch's workers are daemons. A sampler's `__iter__` may start other processes, which must end by SIGTERM.
        if getattr(_iterating, "pid", None) != os.getpid() or not process.daemon:
            start(process)
            return
        with signals.sigterm_held_back():
            start(process)
        # The worker ignores SIGTERM, so `terminate` sends SIGKILL. The proxy avoids a reference cycle, which would keep
        # descriptors open until a garbage collection.
        process.terminate = functools.partial(type(process).kill, weakref.proxy(process))  # type: ignore[method-assign]
        _workers.add(process)

    DataLoader.__iter__ = iterate_shielded  # type: ignore[method-assign]
    BaseProcess.start = start_shielded  # type: ignore[assignment, method-assign]
    forkserver.set_forkserver_preload = _note_preloaded
    atexit.register(_kill_workers)  # runs before `multiprocessing` sends SIGTERM and waits for the workers' ends


def _begin(given: Callable[[int], None] | None, worker: int) -> None:
    """Make this DataLoader worker ignore SIGTERM, and call the user's `worker_init_fn`.

    Runs after torch has set signal handlers in the worker.

    Args:
        given: The user's `worker_init_fn`. None without one.
        worker: Index of the worker in its loader.
    """
    signals.leave_sigterm_to_parent()
    if given is not None:
        given(worker)


def _kill_workers() -> None:
    for worker in _workers:
        worker.kill()


def _note_preloaded(modules_names: list[str]) -> None:
    """Pass the user's modules on to `multiprocessing`'s fork server, and store their names.

    `multiprocessing` has no public function that returns the names.
    """
    _preloaded[:] = modules_names
    _set_preloaded(modules_names)


def _start_forerunners(start_method: str | None) -> None:
    """Start `multiprocessing`'s own server processes before SIGTERM is blocked.

    A fork server that starts with SIGTERM blocked would pass the blocked signal on to all its children for ever. The
    resource tracker would unblock SIGTERM too early.
    """
    if start_method == "forkserver":
        _set_preloaded([*_preloaded, PRELOADED])
        forkserver.ensure_running()
    elif start_method == "spawn":
        resource_tracker.ensure_running()
