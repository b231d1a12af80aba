"""SIGTERM to a task's process, and its end. Runs in the driver."""

import atexit
import contextlib
import functools
import gc
import signal
import threading
from collections.abc import Iterator

from flytekitplugins.daskpytorch.errors import PreemptedError
from flytekitplugins.daskpytorch.protocol.host import preempt_all

__all__ = ["SIGTERM", "exit_quickly", "heeding_sigterm"]

SIGTERM = "the task was told to end (SIGTERM)"
"""Why gangs end then."""


@functools.cache
def exit_quickly() -> None:
    """Have this process end without a last search for garbage, which takes two seconds where torch is imported."""
    atexit.register(gc.freeze)


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
