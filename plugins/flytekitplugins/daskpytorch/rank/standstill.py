"""Reports if a rank stands still, without a new collective or sign of life, and writes its threads' stacks.

Runs in a rank.
"""

import contextlib
import faulthandler
import fcntl
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from termios import FIONREAD, TIOCOUTQ
from typing import IO

from flytekitplugins.daskpytorch.context import Progress
from flytekitplugins.daskpytorch.protocol.orders import DUMP_SIGNAL, MAX_STACKS
from flytekitplugins.daskpytorch.protocol.reports import Stands
from flytekitplugins.daskpytorch.rank import process_group

INTERVAL = 1.0
"""Seconds between two reads of the counts. A read takes microseconds."""
NUM_EQUAL = 2
"""Number of intervals without a change after which the rank counts as standing still."""
RECEIVED = struct.Struct("=B127xQ")
"""Socket state and `tcpi_bytes_received` in the kernel's `struct tcp_info`, since Linux 4.1."""
LISTENS = 10
"""State of a listening socket, `TCP_LISTEN`."""


def watch(progress: Progress, tell: Callable[[Stands], None]) -> None:
    """Start a thread that reports when the rank begins and ends to stand still."""

    def report() -> None:
        counted, num_equal, is_still = None, 0, False
        while True:
            time.sleep(INTERVAL)
            counts = process_group.num_exchanges(), progress.num_moves
            num_equal = num_equal + 1 if counts == counted else 0
            counted = counts
            if is_still is not (num_equal >= NUM_EQUAL):
                is_still = not is_still
                tell(Stands(is_still))

    threading.Thread(target=report, name="daskpytorch-standstill", daemon=True).start()


def received_bytes() -> int | None:
    """Return the bytes that this process has received by TCP. None if its sockets hold queued bytes, or if unknown."""
    total = 0
    try:
        for file in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if str(file.readlink()).startswith("socket:"):
                    received = _received_by(int(file.name))
                    if received is None:
                        return None
                    total += received
    except (OSError, struct.error):
        return None
    return total


def _received_by(descriptor: int) -> int | None:
    with socket.socket(fileno=os.dup(descriptor)) as sock:
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
            return 0
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, RECEIVED.size)
        state, received = RECEIVED.unpack(info)
        if state == LISTENS:
            return 0
        queued = (struct.unpack("i", fcntl.ioctl(sock, asked, bytes(4)))[0] for asked in (FIONREAD, TIOCOUTQ))
        return None if any(queued) else received


def write_stacks_to(path: Path) -> None:
    """Write the main thread's stack to this file on `DUMP_SIGNAL`, and all stacks to the log on a crash in C code."""
    global _stacks_file
    faulthandler.enable()
    _stacks_file = path.open("a+")
    # A signal handler that reads other threads' frames while they change may crash (python/cpython#116008).
    faulthandler.register(DUMP_SIGNAL, _stacks_file, all_threads=False)


def stacks() -> str:
    """Return the stacks of all threads. This thread holds the GIL meanwhile, so that the stacks do not change."""
    if _stacks_file is None:
        return ""
    _stacks_file.truncate(0)
    faulthandler.dump_traceback(_stacks_file, all_threads=True)
    text = os.pread(_stacks_file.fileno(), MAX_STACKS, 0).decode(errors="replace")
    _stacks_file.truncate(0)  # later content comes from a `DUMP_SIGNAL` sent by hand
    return text


def show_stacks() -> None:
    """Write all stacks to standard error, without `sys.stderr`, whose lock a hanging thread may hold."""
    with contextlib.suppress(OSError):  # standard error may be closed
        os.write(2, f"\n{stacks()}".encode())


_stacks_file: IO[str] | None = None
"""File for stacks, open as long as the rank may receive `DUMP_SIGNAL`. None outside a rank's own process."""
