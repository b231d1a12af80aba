"""Ends a rank as Python ends a program: threads, exit functions and open files first. Runs in ranks."""

import atexit
import contextlib
import gc
import io
import multiprocessing
import os
import signal
import sys
import threading

from flytekitplugins.daskpytorch.rank import standstill
from flytekitplugins.daskpytorch.rank.link import GangLink

END_GRACE = 10.0
"""Seconds that a rank's threads, executors, child processes and exit functions get to end after the user's function.
Then the rank ends regardless."""
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


def wind_up(rank: int, link: GangLink, outcome: int, exit_code: int = 1) -> None:
    """Close the observers with the outcome (0: success, 1: failed or stopped), and do what Python does at its exit.

    Waits for threads and executors, calls the exit functions, and flushes open files and the output. The fork server's
    ranks exit by `os._exit`, which skips these steps. If the steps take longer than `END_GRACE`, the rank ends with
    `exit_code`.
    """
    link.observers.tell("close", outcome)
    link.has_closed_observers.set()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # without torch's handler, which raises when loader workers end
    watch = threading.Timer(END_GRACE, _end_late, (rank, exit_code))
    watch.daemon = True
    watch.start()
    threading._shutdown()  # type: ignore[attr-defined] # noqa: SLF001 - executors first, then other threads: 3.11 to 3.14
    atexit._run_exitfuncs()  # noqa: SLF001 - multiprocessing's children among them
    if link.has_failed or exit_code == 0:  # a rank that ends with another one must not delay the restart
        flush_files()
    watch.cancel()
    sys.stdout.flush()
    sys.stderr.flush()


def flush_files() -> None:
    """Write the buffers of all open files, such as a log that the program never closes.

    Files that were open at a `gc.freeze()` of the program's own are left out: `gc` cannot tell them in a short time.
    """
    objects = gc.get_objects()
    files = set()
    for key, kind in {id(type(each)): type(each) for each in objects}.items():  # not all types have a hash
        with contextlib.suppress(Exception):  # of a metaclass
            if issubclass(kind, io.IOBase):
                files.add(key)
    for each in objects:
        if id(type(each)) in files:
            with contextlib.suppress(Exception):  # a closed file, a full disk, a pipe without a reader
                each.flush()


def _end_late(rank: int, exit_code: int) -> None:
    """End a rank that takes too long to exit. First print its remaining threads and processes, and all stacks."""
    main = threading.main_thread()
    left = [f"thread {thread.name!r}" for thread in threading.enumerate() if not thread.daemon and thread is not main]
    left += [f"process {child.name!r} (pid {child.pid})" for child in multiprocessing.active_children()]
    named = ", ".join(left) or "an exit function"
    text = f"rank {rank} is ended {END_GRACE:g} s after its function, with what had not ended by then: {named}\n"
    os.write(2, text.encode())  # not by `sys.stderr`, whose lock a hanging thread may hold
    standstill.show_stacks()
    os._exit(exit_code)
