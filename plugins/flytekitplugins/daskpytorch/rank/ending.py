"""Ends a rank as Python ends a program: threads, exit functions and open files first. Runs in ranks."""

import atexit
import contextlib
import os
import signal
import socket
import sys
import threading
from pathlib import Path

from flytekitplugins.daskpytorch.process import program_end
from flytekitplugins.daskpytorch.rank.link import GangLink

EXIT_TIME = 1.0
"""Maximum seconds for a failed rank's threads and exit functions, after the order to quit and the observers' end. A
restart waits for them."""
EXIT_RESERVE = 0.45
"""Maximum seconds between a failed rank's end and the agent's kill."""
EXIT_SHARE = 0.7
"""Share of the grace period after which a failed rank ends, if `EXIT_RESERVE` is more than the rest of the period."""
FIRST_FLUSH = 0.1
"""Seconds from the order to quit until a failed rank's open files are first written. Most failed ranks have ended by
then."""
GRACE = 2.0
"""Seconds from the end of a rank's program until its peers lose their connections to the rank. The system sends what is
still in the sockets."""
LOOK_INTERVAL = 0.1
"""Seconds between two looks at the threads of a rank whose function has returned."""


def leaves_early(link: GangLink) -> bool:
    """Return True once this rank's program has ended, or False once all ranks' functions have returned before.

    As under Python, a program ends with its threads and child processes.
    """
    while program_end.has_work():
        if link.ended.wait(LOOK_INTERVAL):
            return False
    return not link.ended.wait(GRACE)


def close_connections(store_port: int | None) -> None:
    """Have collectives of peers that wait for this rank fail, while this process goes on.

    Ends all TCP connections but those of Python's sockets and of the rendezvous store. gloo has no other way: `abort`
    and `shutdown` leave the connections open, and a group that a variable holds outlives `destroy_process_group`
    (torch 2.15).

    Args:
        store_port: Port of the rendezvous store. None: no store.
    """
    pythons = {each.fileno() for each in program_end.instances_of(socket.socket)}
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile, or a socket that listens
            if int(file.name) not in pythons and str(file.readlink()).startswith("socket:"):
                _close(int(file.name), store_port)


def _close(descriptor: int, store_port: int | None) -> None:
    with socket.socket(fileno=os.dup(descriptor)) as sock:
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
            return
        if store_port not in (sock.getsockname()[1], sock.getpeername()[1]):
            sock.shutdown(socket.SHUT_WR)


def wind_up(rank: int, link: GangLink, outcome: int, *, has_returned: bool) -> None:
    """Close the observers with the outcome (0: success, 1: failed or stopped), and do what Python does at its exit.

    Waits for threads and executors, calls the exit functions, and flushes open files and the output. The fork server's
    ranks exit by `os._exit`, which skips these steps. After `program_end.MAX_WAIT` the rank ends regardless, with the
    exit code `program_end.LATE`.
    """
    link.observers.tell("close", outcome)
    link.has_closed_observers.set()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # without torch's handler, which raises when loader workers end
    with program_end.watched(f"rank {rank}", program_end.MAX_WAIT):
        threading._shutdown()  # type: ignore[attr-defined] # noqa: SLF001 - executors, then other threads: 3.11 to 3.14
        atexit._run_exitfuncs()  # noqa: SLF001 - multiprocessing's children among them
        if link.has_failed or has_returned:  # a rank that ends with another one must not delay the restart
            program_end.flush_files()
    sys.stdout.flush()
    sys.stderr.flush()
