"""A task's process: its early start by a command line, SIGTERM, and the process's exit. Runs in the driver."""

import atexit
import contextlib
import functools
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from itertools import dropwhile
from pathlib import Path

from flytekitplugins.daskpytorch.errors import PreemptedError
from flytekitplugins.daskpytorch.process.ending import CtrlC
from flytekitplugins.daskpytorch.process.system import runs_gangs
from flytekitplugins.daskpytorch.protocol.host import preempt_all
from flytekitplugins.daskpytorch.settings import is_debugging

NOT_HERE = {"--remote", "-r", "--help"}
"""Options of `run` with which no task runs on this machine."""
NAME = b"plugins.daskpytorch"
SIGTERM = "the task was told to end (SIGTERM)"
IDLE_SIGTERM = f"{SIGTERM}, while no gang was running; the next attempt calls the task's function again"


def is_worthwhile(arguments: Sequence[str], program: str, *, here: Sequence[str] = ()) -> bool:
    """Return True if a command line runs a task locally, from a file that names this package.

    The gangs' fork server then starts before the tasks' file and torch are imported, which takes seconds. `here` are
    options of which every local run has at least one. If empty, each run without `--remote` or `-r` is local.
    """
    if is_debugging() or not runs_gangs():
        return False
    called, *rest = arguments or [""]
    _, *options = list(dropwhile(lambda option: option != "run", rest)) or [""]
    file, *what = list(dropwhile(lambda option: not option.endswith(".py"), options)) or [""]
    if Path(called).name != program or not what or not NOT_HERE.isdisjoint(rest):
        return False
    if here and set(here).isdisjoint(options[: options.index(file)]):
        return False
    with contextlib.suppress(OSError):  # the host reports an unreadable file
        return NAME in Path(file).read_bytes()
    return False


@functools.cache
def exit_quickly() -> None:
    """Let this process skip Python's garbage collection at exit, which takes two seconds once torch is imported."""
    atexit.register(_leave_garbage)


def _leave_garbage() -> None:
    global _silence
    gc.freeze()
    if "triton" in sys.modules:
        _silence = _Silence()


class _Silence:
    """Silences standard error at exit: the library that binds triton to Python reports its objects in 30 lines."""

    def __init__(self) -> None:
        self._redirect = functools.partial(os.dup2, os.open(os.devnull, os.O_WRONLY), 2)

    def __del__(self) -> None:
        self._redirect()


def _raise_idle() -> None:
    raise PreemptedError(IDLE_SIGTERM, cause=SIGTERM)


@contextlib.contextmanager
def heeding_sigterm(end_task: Callable[[], object] = _raise_idle) -> Iterator[None]:
    """During the block, let SIGTERM end the process's gangs after a checkpoint, or without a gang call `end_task`."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread can handle signals
        yield
        return
    previous = signal.signal(signal.SIGTERM, lambda *_: preempt_all(SIGTERM) or end_task())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


ctrl_c: ContextVar[CtrlC] = ContextVar("daskpytorch.ctrl_c")
_silence: _Silence | None = None
