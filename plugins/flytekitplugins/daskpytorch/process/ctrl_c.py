"""Ctrl-C while a task runs: the first ends the gang in good order, and the second ends the process at once.

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
"""Escape sequence that shows the terminal's cursor again, which a live display has hidden."""


class CtrlC:
    """Handler of Ctrl-C for one task."""

    def __init__(self) -> None:
        self.was_pressed = False
        self._end_gang: Callable[[], object] | None = None
        self._is_anothers: Callable[[], bool] | None = None
        self._usual: Any = signal.default_int_handler

    @contextlib.contextmanager
    def heeded(self) -> Iterator[None]:
        """Handle Ctrl-C in the block, except outside the main thread and in processes that ignore Ctrl-C.

        After a first Ctrl-C, the handler stays until the process ends, which may take a moment. Notebooks and prompts
        get their own handler back.
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
        """Make the first Ctrl-C in the block end the gang, and raise the usual exception only after the block.

        An exception inside the block could leave half a message on an agent's connection.

        Args:
            end_gang: Ends the gang. Called in the signal handler.
            is_anothers: Returns True if a debugger, for example, takes the Ctrl-C. This handler then ignores the
                Ctrl-C. None means False.
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
                raise error from None  # the user need not read that the gang was cancelled

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
    """Make the first Ctrl-C call `end`, and raise it only after the block. The block waits for that end.

    A second Ctrl-C interrupts the block itself, possibly with a lock locked for ever and a thread blocked. Outside the
    main thread, or if Python's own handler is replaced, this context does nothing.

    Args:
        end: Function to call. Returns False if the Ctrl-C should not be raised. None makes this context do nothing.

    Yields:
        A function that returns True if Ctrl-C was pressed.
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
    """Return True if a user goes on with this process, in a notebook or at Python's prompt."""
    return hasattr(sys, "ps1") or ("IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None)


def _end_process() -> None:
    """End this process at once. All ranks end, too, and the machine's next gang removes the scratch folders."""
    with contextlib.suppress(OSError):
        if os.isatty(2):
            os.write(2, f"{SHOW_CURSOR}\n".encode())
    os._exit(EXIT_CODE)
