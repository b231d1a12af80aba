"""The stacks of this rank's threads: for the driver that asks, and for its log at a signal. Runs in a rank."""

import contextlib
import faulthandler
import os
from pathlib import Path
from typing import IO

from flytekitplugins.daskpytorch.protocol.orders import DUMP_SIGNAL, MAX_STACKS

_file: IO[str] | None = None
"""Stays open for as long as `DUMP_SIGNAL` may come; None in a process that is not the rank's own."""


def write_to(path: Path) -> None:
    """Have `DUMP_SIGNAL` write the main thread's stack to this file, and a crash in C code all stacks to the log."""
    global _file
    faulthandler.enable()
    _file = path.open("a+")
    # Of the other threads a signal handler may read frames that they are changing, and crash: python/cpython#116008.
    faulthandler.register(DUMP_SIGNAL, _file, all_threads=False)


def of_all_threads() -> str:
    """Return what all threads do, written down while this one holds the interpreter, so that they stand still."""
    if _file is None:
        return ""
    _file.truncate(0)
    faulthandler.dump_traceback(_file, all_threads=True)
    stacks = os.pread(_file.fileno(), MAX_STACKS, 0).decode(errors="replace")
    _file.truncate(0)  # it is told; what is found there later was asked for by hand
    return stacks


def show() -> None:
    """Write all stacks to standard error, past `sys.stderr`, whose lock a thread that hangs may hold."""
    with contextlib.suppress(OSError):  # it may be closed
        os.write(2, f"\n{of_all_threads()}".encode())
