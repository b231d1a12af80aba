"""Ends a rank as Python ends a program: threads, exit functions and open files first. Runs in ranks."""

import atexit
import signal
import sys
import threading

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
