"""Makes the workers of a rank's DataLoaders ignore SIGTERM, so that only the rank ends them. Runs in both.

Torch sets the workers' signal handlers and has no public hook for others. The private names below replace a hook.
"""

import functools
import multiprocessing
import weakref
from multiprocessing import forkserver, resource_tracker
from typing import Any

from torch.utils.data import dataloader
from torch.utils.data._utils import signal_handling, worker

from flytekitplugins.daskpytorch.process import sigterm

PRELOADED = f"{__package__}.loaders_preload"

_work = worker._worker_loop  # noqa: SLF001
_set_signal_handlers = signal_handling._set_worker_signal_handlers  # type: ignore[attr-defined] # noqa: SLF001


def shield() -> None:
    """Patch all later DataLoaders of this process. The workers of each start method then ignore SIGTERM."""
    iterator = dataloader._MultiProcessingDataLoaderIter  # noqa: SLF001
    start = iterator.__init__

    @functools.wraps(start)
    def start_held_back(self: Any, loader: Any) -> None:
        _start_forerunners((loader.multiprocessing_context or multiprocessing).get_start_method())
        with sigterm.held_back():
            start(self, loader)
        for process in self._workers:
            popen = process._popen  # noqa: SLF001
            # The worker ignores SIGTERM, so `terminate` sends SIGKILL. The proxy avoids a reference cycle, which would
            # keep descriptors open until a garbage collection.
            popen.terminate = functools.partial(type(popen).kill, weakref.proxy(popen))

    iterator.__init__ = start_held_back  # type: ignore[method-assign]
    worker._worker_loop = work  # type: ignore[assignment] # noqa: SLF001


def work(*args: Any) -> None:
    """Run torch's worker loop in a worker that ignores SIGTERM."""
    signal_handling._set_worker_signal_handlers = _set_handlers  # type: ignore[attr-defined] # noqa: SLF001
    _work(*args)


def _set_handlers() -> None:
    _set_signal_handlers()
    sigterm.leave_to_parent()


def _start_forerunners(start_method: str | None) -> None:
    """Start `multiprocessing`'s own server processes before SIGTERM is blocked.

    A fork server that starts with SIGTERM blocked would pass the blocked signal on to all its children for ever. The
    resource tracker would unblock SIGTERM too early.
    """
    if start_method == "forkserver":
        modules = forkserver._forkserver._preload_modules  # type: ignore[attr-defined] # noqa: SLF001 - the user's own
        if PRELOADED not in modules:
            forkserver.set_forkserver_preload([*modules, PRELOADED])
        forkserver.ensure_running()
    elif start_method == "spawn":
        resource_tracker.ensure_running()
