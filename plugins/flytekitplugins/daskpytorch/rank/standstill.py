"""Reports a rank's signs of life, reports when the rank stands still, and writes the stacks of its threads.

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
from pathlib import Path
from termios import FIONREAD, TIOCOUTQ
from typing import IO

from flytekitplugins.daskpytorch.protocol.orders import DUMP_SIGNAL, MAX_STACKS, RankOrder
from flytekitplugins.daskpytorch.protocol.reports import Stands
from flytekitplugins.daskpytorch.rank import process_group
from flytekitplugins.daskpytorch.rank.link import GangLink

INTERVAL = 1.0
"""Maximum number of seconds between two reads of the counts of collectives and signs of life. A read takes
microseconds."""
PATIENCE = 2.0
"""Seconds without a new collective or sign of life after which a rank counts as standing still."""
RECEIVED = struct.Struct("=B127xQ")
"""Format that reads a socket's state and its `tcpi_bytes_received` from the kernel's `struct tcp_info` (Linux 4.1)."""
LISTENS = 10
"""Kernel's number for the state of a listening socket, `TCP_LISTEN`."""


def watch(order: RankOrder, link: GangLink) -> None:
    """Start a thread that reports this rank's signs of life, and the start and end of each standstill.

    A rank stands still if it has begun no collective and given no sign of life for two seconds.
    """
    pulse, progress = order.job.pulse, link.progress
    if pulse is not None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(lambda *_: progress.move())

    def report() -> None:
        counted, changed_at, is_still, reported, report_at = None, time.monotonic(), False, -1, 0.0
        while True:
            counts, now = (process_group.num_exchanges(), progress.num_moves), time.monotonic()
            if pulse is not None and counts[1] != reported and now >= report_at:
                reported, report_at = counts[1], now + pulse
                link.send_moves(reported)
            if counts != counted:
                counted, changed_at = counts, now
            if is_still is not (now - changed_at >= PATIENCE):
                is_still = not is_still
                link.send(Stands(is_still))
            time.sleep(min(pulse or INTERVAL, INTERVAL))

    if pulse is not None or order.place.world_size > 1:
        threading.Thread(target=report, name="daskpytorch-pulse", daemon=True).start()


def received_bytes() -> int | None:
    """Return the number of bytes that this process has received by TCP.

    None if the number is unknown, or if a socket of this process still has queued bytes.
    """
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
    """From now on, write the main thread's stack to this file on SIGQUIT, and all stacks to the log on a crash in C."""
    global _stacks_file
    faulthandler.enable()
    _stacks_file = path.open("a+")
    # A signal handler that reads other threads' frames while they change may crash (python/cpython#116008).
    faulthandler.register(DUMP_SIGNAL, _stacks_file, all_threads=False)


def stacks() -> str:
    """Return the stacks of all threads. This thread holds the GIL meanwhile, so that the stacks do not change.

    Returns "" in a rank that runs in the driver's process.
    """
    if _stacks_file is None:
        return ""
    _stacks_file.truncate(0)
    faulthandler.dump_traceback(_stacks_file, all_threads=True)
    text = os.pread(_stacks_file.fileno(), MAX_STACKS, 0).decode(errors="replace")
    _stacks_file.truncate(0)  # later content comes from a `DUMP_SIGNAL` sent by hand
    return text


def show_stacks() -> None:
    """Write the stacks of all threads to standard error, without `sys.stderr`, whose lock a hanging thread may hold."""
    with contextlib.suppress(OSError):  # standard error may be closed
        os.write(2, f"\n{stacks()}".encode())


_stacks_file: IO[str] | None = None
"""File for the rank's stacks, open as long as the rank may receive SIGQUIT. None outside a rank's own process."""
