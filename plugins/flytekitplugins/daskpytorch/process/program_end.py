"""Ends a program as Python does: waits for threads, executors and child processes, writes files. Runs in ranks.

A rank ends its whole process so, and `run_script` what the script has started.
"""

import contextlib
import faulthandler
import gc
import io
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, thread
from typing import TypeVar

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
        _write(f"{who} has ended, and its process waits{limit} for {_named_rest()}")
        if not is_over.wait(max_wait and max_wait - NOTICE_AFTER):
            _write(f"{who} is ended after {max_wait:g} s, with what had not ended by then: {_named_rest()}")
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


def _write(line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())  # not by `sys.stderr`, whose lock a hanging thread may hold


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
