"""Ctrl-C in the driver, and SIGTERM in fork servers, ranks and their loader workers.

The first Ctrl-C ends the gang in good order, and the second ends the process at once.

Slurm and some container runtimes send SIGTERM to all processes at once. Only the task or the Dask worker reacts, and
stops its ranks after a last checkpoint, until which all child processes must survive.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

EXIT_CODE = 128 + signal.SIGINT
SHOW_CURSOR = "\x1b[?25h"


class CtrlC:
    def __init__(self) -> None:
        self.was_pressed = False
        self._end_gang: Callable[[], object] | None = None
        self._usual: Any = signal.default_int_handler

    @contextlib.contextmanager
    def heeded(self) -> Iterator[None]:
        """Handle Ctrl-C in the main thread, unless it is ignored.

        After a first Ctrl-C, only notebooks and prompts get their own handler back.
        """
        usual = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(usual):
            yield
            return
        self._usual = usual
        signal.signal(signal.SIGINT, self._press)
        try:
            yield
        finally:
            if not self.was_pressed or is_interactive():
                signal.signal(signal.SIGINT, usual)

    @contextlib.contextmanager
    def ends(self, end_gang: Callable[[], object]) -> Iterator[None]:
        """Make the first Ctrl-C call `end_gang` (in the handler), and the usual handler only after the context.

        An exception inside the context could leave half a message on an agent's connection.
        """
        self._end_gang = end_gang
        try:
            yield
        except BaseException:
            if not self.was_pressed:
                raise
        finally:
            self._end_gang = None
        if self.was_pressed:
            try:
                self._usual(signal.SIGINT, None)
            except BaseException as error:
                raise error from None  # the user need not read that the gang was cancelled

    def _press(self, *how: Any) -> None:
        if self.was_pressed and not is_interactive():
            _end_process()
        is_first, self.was_pressed = not self.was_pressed, True
        if is_first and self._end_gang is not None:
            self._end_gang()
        else:
            self._usual(*how)


@contextlib.contextmanager
def deferred(end: Callable[[], object] | None) -> Iterator[Callable[[], bool]]:
    """Make the first Ctrl-C call `end`, and raise `KeyboardInterrupt` only after the context.

    A second Ctrl-C interrupts the context, possibly with a lock locked for ever and a thread blocked. Does nothing
    without `end`, outside the main thread, or if Python's own handler is replaced. Yields a function that returns True
    if Ctrl-C was pressed.
    """
    pressed: list[Any] = []
    is_main = threading.current_thread() is threading.main_thread()
    if end is None or not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False
        return

    def press(*how: Any) -> None:
        if pressed:
            signal.default_int_handler(*how)
        else:
            pressed.append(how)
            end()

    signal.signal(signal.SIGINT, press)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if pressed:
        signal.default_int_handler(*pressed[0])


def is_interactive() -> bool:
    return hasattr(sys, "ps1") or ("IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None)


def _end_process() -> None:
    with contextlib.suppress(OSError):
        if os.isatty(2):
            os.write(2, f"{SHOW_CURSOR}\n".encode())
    os._exit(EXIT_CODE)


_is_registered = False
_forking = threading.local()


@contextlib.contextmanager
def sigterm_held_back() -> Iterator[None]:
    """Block SIGTERM in this thread and its child processes, which unblock it after they install a handler."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_sigterm_to_parent() -> None:
    """Make this process survive SIGTERM. Call this function in the main thread.

    Programs that this process starts would inherit an ignored SIGTERM, but no handler. Forks end by SIGTERM as usual.
    """
    global _is_registered
    signal.signal(signal.SIGTERM, _pass)
    signal.siginterrupt(signal.SIGTERM, False)  # system calls in C code restart after SIGTERM
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    if not _is_registered:
        # SIGTERM is blocked around a fork. Otherwise the child would lose one that arrives before its handler changes.
        os.register_at_fork(before=_hold_back, after_in_parent=_let_go, after_in_child=_heed_again)
        _is_registered = True


def is_handled(number: int) -> bool:
    """Return True if Python code handles the signal, other than by `leave_sigterm_to_parent`."""
    handler = signal.getsignal(number)
    return callable(handler) and handler is not _pass


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
