"""Keeps processes from SIGTERM that takes its orders from a parent. Runs in fork servers, ranks, their loader workers.

Slurm and some container runtimes send SIGTERM to all processes at once, where the task or the Dask worker alone is to
hear it: these end the ranks in good order, once they have saved. Their children must be there to be ended so. SIGINT
needs none of this, since fork servers and ranks have sessions of their own, out of a terminal's reach.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

_is_registered = False
_forking = threading.local()
"""What a thread that forks held back before."""


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Let SIGTERM wait, for this thread and for what it starts meanwhile, until that says what becomes of it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_to_parent() -> None:
    """Do nothing about SIGTERM; to be called in the main thread.

    A handler, since what is ignored would be ignored by all programs that are started from here, too. What is forked
    from here, such as a `multiprocessing.Process`, ends by SIGTERM as usual.
    """
    global _is_registered
    signal.signal(signal.SIGTERM, _pass)
    signal.siginterrupt(signal.SIGTERM, False)  # nor is C code to notice
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    if not _is_registered:
        # Held back, so that one for the child is not lost while its handler is still this one.
        os.register_at_fork(before=_hold_back, after_in_parent=_let_go, after_in_child=_heed_again)
        _is_registered = True


def _pass(*_: object) -> None:
    """Handles the signal."""


def _hold_back() -> None:
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _let_go() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _heed_again() -> None:
    if signal.getsignal(signal.SIGTERM) is _pass:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _let_go()
