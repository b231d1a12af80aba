"""How a program ends: by Ctrl-C in the driver, by SIGTERM, and, in ranks, with what Python waits for.

The first Ctrl-C ends the gang in good order, and the second ends the process at once.

Slurm and some container runtimes send SIGTERM to all processes at once. Only the task or the Dask worker reacts, and
stops its ranks after a last checkpoint, until which all child processes must survive.

A rank ends its whole process as Python does: it waits for threads, executors and child processes, and writes files.
`run_script` so ends what the script has started.
"""

import contextlib
import faulthandler
import gc
import io
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, thread
from typing import Any, TypeVar

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


# ---- The end of a program that returns

NOTICE_AFTER = 10.0
MAX_WAIT = 300.0
"""Seconds for a rank's threads, executors, child processes and exit functions, before the rank ends regardless."""
T = TypeVar("T")
IDLE = thread._worker.__code__  # noqa: SLF001
"""Innermost code of an executor's thread that waits for work."""
LATE = 1


@contextlib.contextmanager
def watched(who: str, max_wait: float | None) -> Iterator[None]:
    is_over = threading.Event()

    def watch() -> None:
        if is_over.wait(NOTICE_AFTER):
            return
        limit = f" for at most {max_wait:g} s" if max_wait is not None else ""
        tell(f"{who} has ended, and its process waits{limit} for {_named_rest()}")
        if not is_over.wait(max_wait and max_wait - NOTICE_AFTER):
            tell(f"{who} is ended after {max_wait:g} s, with what had not ended by then: {_named_rest()}")
            faulthandler.dump_traceback(2)
            os._exit(LATE)

    threading.Thread(target=watch, name="daskpytorch-end", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def has_work() -> bool:
    """Return True if Python would wait at its exit for threads (but idle ones of executors) or child processes."""
    frames, main = sys._current_frames(), threading.main_thread()  # noqa: SLF001 - Python documents it
    threads = [each for each in threading.enumerate() if not each.daemon and each is not main]
    if any(getattr(frames.get(each.ident or 0), "f_code", None) is not IDLE for each in threads):
        return True
    return any(not child.daemon for child in multiprocessing.active_children())


def tell(text: str) -> None:
    """Write to standard error, without `sys.stderr`, whose lock a hanging thread may hold."""
    with contextlib.suppress(OSError):  # standard error may be closed
        os.write(2, f"{text}\n".encode())


def _named_rest() -> str:
    main = threading.main_thread()
    left = [f"thread {thread.name!r}" for thread in threading.enumerate() if not thread.daemon and thread is not main]
    left += [f"process {child.name!r} (pid {child.pid})" for child in multiprocessing.active_children()]
    return ", ".join(left) or "an exit function"


@contextlib.contextmanager
def finished(who: str, max_wait: float | None) -> Iterator[None]:
    """After the block, wait for its threads, executors and child processes, and write its open files.

    If the block raises an exception, the process does so at its own exit. Exit functions run there in any case.
    """
    threads, children = set(threading.enumerate()), set(multiprocessing.active_children())
    yield
    with watched(who, max_wait):
        while left := {each for each in threading.enumerate() if each not in threads and not each.daemon}:
            _shut_down_executors(left)
            for thread in left:
                thread.join()
        for child in multiprocessing.active_children():
            if child not in children and not child.daemon:
                child.join()
    flush_files()


def _shut_down_executors(threads: set[threading.Thread]) -> None:
    for each in list(instances_of(Executor)):
        own = {getattr(each, "_executor_manager_thread", None), *getattr(each, "_threads", ())}
        if not threads.isdisjoint(own):
            each.shutdown()


def flush_files() -> None:
    """Write the buffers of all open files, such as a log that the program never closes.

    Files that were open at a `gc.freeze()` of the program's own are left out: `gc` cannot tell them in a short time.
    """
    for each in instances_of(io.IOBase):
        with contextlib.suppress(Exception):  # a closed file, a full disk, a pipe without a reader
            each.flush()


def instances_of(of: type[T]) -> Iterator[T]:
    objects = gc.get_objects()
    kinds = set()
    for key, kind in {id(type(each)): type(each) for each in objects}.items():  # not all types have a hash
        with contextlib.suppress(Exception):  # of a metaclass
            if issubclass(kind, of):
                kinds.add(key)
    yield from (each for each in objects if id(type(each)) in kinds)
