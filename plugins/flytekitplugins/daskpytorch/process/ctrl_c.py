"""Ctrl-C while a task runs here: the first ends its gang in good order, a second one the process at once.

Runs in the driver.
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
"""To a terminal, which has hidden it for a live display."""


class CtrlC:
    """What becomes of Ctrl-C in one task; all the same whether anybody heeds it."""

    def __init__(self) -> None:
        self.was_pressed = False
        self._end_gang: Callable[[], object] | None = None
        self._is_anothers: Callable[[], bool] | None = None
        self._usual: Any = signal.default_int_handler

    @contextlib.contextmanager
    def heeded(self) -> Iterator[None]:
        """Handle it, unless that is left to others: signals are the main thread's, and some processes ignore this one.

        After the first, a second one is handled to the very end of the process, which may take a moment.
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
            if not self.was_pressed or _is_interactive():
                signal.signal(signal.SIGINT, usual)

    @contextlib.contextmanager
    def ends(self, end_gang: Callable[[], object], is_anothers: Callable[[], bool] | None = None) -> Iterator[None]:
        """Have it call this, and raise what it usually raises only once the gang has ended.

        Nothing of that where `is_anothers` says that it has passed it on.
        Raised wherever the driver is, it could leave half a message on its way to an agent.
        """
        self._end_gang, self._is_anothers = end_gang, is_anothers
        try:
            yield
        except BaseException:
            if not self.was_pressed:
                raise
        finally:
            self._end_gang = self._is_anothers = None
        if self.was_pressed:
            try:
                self._usual(signal.SIGINT, None)
            except BaseException as error:
                raise error from None  # that the gang was cancelled explains nothing to whoever did it

    def _press(self, *how: Any) -> None:
        if self._is_anothers is not None and self._is_anothers():
            return
        if self.was_pressed and not _is_interactive():
            _end_process()
        is_first, self.was_pressed = not self.was_pressed, True
        if is_first and self._end_gang is not None:
            self._end_gang()
        else:
            self._usual(*how)


@contextlib.contextmanager
def deferred(end: Callable[[], bool] | None) -> Iterator[Callable[[], bool]]:
    """Have the first Ctrl-C call `end`, and be raised only after the block, which is to wait for that end.

    Raised inside the block, a second one could leave a lock locked for ever, and with it the thread that is waited for.
    Where the main thread is not this one, or has another handler than Python's own, everything stays as it is.

    Args:
        end: What to do. It returns False where the Ctrl-C is not to be raised. None: nothing is to be done.

    Yields:
        A function that says whether Ctrl-C was pressed.
    """
    pressed: list[Any] = []
    is_main = threading.current_thread() is threading.main_thread()
    if end is None or not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False
        return

    def press(*how: Any) -> None:
        if pressed:
            signal.default_int_handler(*how)
        elif end():
            pressed.append(how)

    signal.signal(signal.SIGINT, press)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if pressed:
        signal.default_int_handler(*pressed[0])


def _is_interactive() -> bool:
    """Whether somebody goes on with this process: in a notebook, or at Python's prompt."""
    return hasattr(sys, "ps1") or ("IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None)


def _end_process() -> None:
    """End this process at once: its ranks end with it, and the next gang here removes its scratch folders."""
    with contextlib.suppress(OSError):
        if os.isatty(2):
            os.write(2, f"{SHOW_CURSOR}\n".encode())
    os._exit(EXIT_CODE)
