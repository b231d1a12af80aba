"""Handling of SIGTERM in a task's process, and of the process's exit. Runs in the driver."""

import atexit
import contextlib
import functools
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator

from flytekitplugins.daskpytorch.errors import PreemptedError
from flytekitplugins.daskpytorch.protocol.host import preempt_all

SIGTERM = "the task was told to end (SIGTERM)"
"""Reason that gangs report when SIGTERM ends them."""


@functools.cache
def exit_quickly() -> None:
    """Skip the last garbage collection at this process's exit, which takes two seconds once torch is imported."""
    atexit.register(_leave_garbage)


def _leave_garbage() -> None:
    global _silence
    gc.freeze()
    if "triton" in sys.modules:
        _silence = _Silence()


class _Silence:
    """Redirects standard error to /dev/null when Python clears its last modules, after all useful output.

    The library that binds triton to Python would otherwise report the remaining objects in 30 lines.
    """

    def __init__(self) -> None:
        self._redirect = functools.partial(os.dup2, os.open(os.devnull, os.O_WRONLY), 2)

    def __del__(self) -> None:
        self._redirect()


@contextlib.contextmanager
def heeding_sigterm() -> Iterator[None]:
    """During the block, let SIGTERM end the gangs after a checkpoint, and the task with a system error."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread can handle signals
        yield
        return
    previous = signal.signal(signal.SIGTERM, _end_task)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _end_task(*_: object) -> None:
    if not preempt_all(SIGTERM):
        raise PreemptedError(f"{SIGTERM}, while no gang was running", cause=SIGTERM)


_silence: _Silence | None = None
"""Object that is deleted when Python clears this module at exit."""
