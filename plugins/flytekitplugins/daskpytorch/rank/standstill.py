"""Where a rank stands: whether it stands still, without a collective or a sign of life, and its threads' stacks.

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
"""Seconds between two looks at the counts, which take microseconds."""
NUM_EQUAL = 2
"""Intervals without a change after which the rank is said to stand still."""
RECEIVED = struct.Struct("=B127xQ")
"""The state and `tcpi_bytes_received` in the kernel's `struct tcp_info`, since Linux 4.1."""
LISTENS = 10
"""The state of a socket that listens, `TCP_LISTEN`."""


def watch(progress: Progress, tell: Callable[[Stands], None]) -> None:
    """Start a thread that reports each change between standing still and going on."""

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
    """Bytes that this process has received by TCP; None while any are on their way in its sockets, or nobody knows."""
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
    """Have `DUMP_SIGNAL` write the main thread's stack to this file, and a crash in C code all stacks to the log."""
    global _stacks_file
    faulthandler.enable()
    _stacks_file = path.open("a+")
    # Of the other threads a signal handler may read frames that they are changing, and crash: python/cpython#116008.
    faulthandler.register(DUMP_SIGNAL, _stacks_file, all_threads=False)


def stacks() -> str:
    """Return what all threads do, written down while this one holds the interpreter, so that they stand still."""
    if _stacks_file is None:
        return ""
    _stacks_file.truncate(0)
    faulthandler.dump_traceback(_stacks_file, all_threads=True)
    text = os.pread(_stacks_file.fileno(), MAX_STACKS, 0).decode(errors="replace")
    _stacks_file.truncate(0)  # it is told; what is found there later was asked for by hand
    return text


def show_stacks() -> None:
    """Write all stacks to standard error, past `sys.stderr`, whose lock a thread that hangs may hold."""
    with contextlib.suppress(OSError):  # it may be closed
        os.write(2, f"\n{stacks()}".encode())


_stacks_file: IO[str] | None = None
"""Stays open for as long as `DUMP_SIGNAL` may come; None in a process that is not the rank's own."""
