"""Reports a rank's signs of life, and if the rank stands still without any, and writes its threads' stacks.

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
"""Maximum number of seconds between two reads of the counts. A read takes microseconds."""
PATIENCE = 2.0
"""Seconds without a change after which the rank counts as standing still."""
RECEIVED = struct.Struct("=B127xQ")
"""Socket state and `tcpi_bytes_received` in the kernel's `struct tcp_info`, since Linux 4.1."""
LISTENS = 10
"""State of a listening socket, `TCP_LISTEN`."""


def watch(order: RankOrder, link: GangLink) -> None:
    """Start a thread that reports signs of life, and when the rank begins and ends to stand still."""
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
