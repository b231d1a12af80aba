"""Protects child processes from SIGTERM: fork servers, ranks and their loader workers.

Slurm and some container runtimes send SIGTERM to all processes at once. Only the task or the Dask worker should react:
both stop their ranks after a last checkpoint. Until then all child processes must survive. SIGINT from a terminal does
not reach fork servers and ranks, which have separate sessions.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

_is_registered = False
_forking = threading.local()
"""Signal mask of the thread that forks, from before the fork."""


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Block SIGTERM in this thread during the context.

    Child processes inherit the blocked signal, and unblock SIGTERM after they install a handler.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_to_parent() -> None:
    """Make this process survive SIGTERM. Call this function in the main thread.

    SIGTERM gets a handler that does nothing. If SIGTERM were ignored, programs that this process starts would ignore it
    as well. Forks of this process, such as a `multiprocessing.Process`, end by SIGTERM as usual.
    """
    global _is_registered
    signal.signal(signal.SIGTERM, _pass)
    signal.siginterrupt(signal.SIGTERM, False)  # system calls in C code restart after SIGTERM
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    if not _is_registered:
        # SIGTERM is blocked around a fork. Otherwise the child would lose one that arrives before its handler changes.
        os.register_at_fork(before=_hold_back, after_in_parent=_let_go, after_in_child=_heed_again)
        _is_registered = True


def _pass(*_: object) -> None:
    """Handle SIGTERM without any effect."""


def _hold_back() -> None:
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _let_go() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _heed_again() -> None:
    if signal.getsignal(signal.SIGTERM) is _pass:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _let_go()
