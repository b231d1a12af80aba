"""SIGTERM to a task's process, and its end. Runs in the driver."""

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
"""Why gangs end then."""


@functools.cache
def exit_quickly() -> None:
    """Have this process end without a last search for garbage, which takes two seconds where torch is imported."""
    atexit.register(_leave_garbage)


def _leave_garbage() -> None:
    global _silence
    gc.freeze()
    if "triton" in sys.modules:
        _silence = _Silence()


class _Silence:
    """Ends standard error when the last of Python's modules are cleared, after all that writes there by then.

    The library by which triton is bound to Python counts what garbage was left, and lists it in 30 lines.
    """

    def __init__(self) -> None:
        self._redirect = functools.partial(os.dup2, os.open(os.devnull, os.O_WRONLY), 2)

    def __del__(self) -> None:
        self._redirect()


@contextlib.contextmanager
def heeding_sigterm() -> Iterator[None]:
    """While a task runs here, have SIGTERM end its gangs after a checkpoint, and the task with a system error."""
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's to handle
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
"""Lives until this module is cleared."""
