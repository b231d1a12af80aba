"""Has the worker processes of a rank's DataLoaders end by no SIGTERM but the rank's. Runs in the rank and in them.

Torch sets what they do about signals, and nowhere lets others have a say: hence the names here that are its own.
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
    """See to it for all the DataLoaders that this process will make, whichever way their workers are started."""
    iterator = dataloader._MultiProcessingDataLoaderIter  # noqa: SLF001
    start = iterator.__init__

    @functools.wraps(start)
    def start_held_back(self: Any, loader: Any) -> None:
        _start_forerunners((loader.multiprocessing_context or multiprocessing).get_start_method())
        with sigterm.held_back():
            start(self, loader)
        for process in self._workers:
            popen = process._popen  # noqa: SLF001
            # It would not heed the other. No reference to itself: its descriptors would wait for a garbage collection.
            popen.terminate = functools.partial(type(popen).kill, weakref.proxy(popen))

    iterator.__init__ = start_held_back  # type: ignore[method-assign]
    worker._worker_loop = work  # type: ignore[assignment] # noqa: SLF001


def work(*args: Any) -> None:
    """Be a worker: what it is to torch, less the death by SIGTERM."""
    signal_handling._set_worker_signal_handlers = _set_handlers  # type: ignore[attr-defined] # noqa: SLF001
    _work(*args)


def _set_handlers() -> None:
    _set_signal_handlers()
    sigterm.leave_to_parent()


def _start_forerunners(start_method: str | None) -> None:
    """Start what `multiprocessing` needs first: held back, it would leave its children so for ever, or end that."""
    if start_method == "forkserver":
        modules = forkserver._forkserver._preload_modules  # type: ignore[attr-defined] # noqa: SLF001 - the user's own
        if PRELOADED not in modules:
            forkserver.set_forkserver_preload([*modules, PRELOADED])
        forkserver.ensure_running()
    elif start_method == "spawn":
        resource_tracker.ensure_running()
