"""The end of a rank's process: what Python does at the end of a program. Runs in a rank.

The fork server's ranks leave by `os._exit`, which does none of that.
"""

import atexit
import multiprocessing
import os
import sys
import threading
import traceback

GRACE = 10.0
"""Seconds for threads, executors, child processes and exit functions to end, from the end of the rank's function on."""


def end_as_program(rank: int, exit_code: int) -> None:
    """Wait for threads and executors, call the exit functions, and flush what was printed, as Python does.

    After `GRACE`, end the process, and name what Python would still wait for.
    """
    has_ended = threading.Event()
    watch = threading.Thread(target=_end_late, args=(has_ended, rank, exit_code), name="daskpytorch-end", daemon=True)
    watch.start()
    threading._shutdown()  # type: ignore[attr-defined] # noqa: SLF001 - executors first, then other threads: 3.11 to 3.14
    atexit._run_exitfuncs()  # noqa: SLF001 - multiprocessing's children among them
    has_ended.set()
    sys.stdout.flush()
    sys.stderr.flush()


def _end_late(has_ended: threading.Event, rank: int, exit_code: int) -> None:
    if has_ended.wait(GRACE):
        return
    text = f"rank {rank} is ended {GRACE:g} s after its function, with what had not ended by then: {_left()}\n"
    os.write(2, text.encode())  # past `sys.stderr`, whose lock a thread may hold that does not end
    os._exit(exit_code)


def _left() -> str:
    """Return the names of the threads, processes or exit functions that Python waits for."""
    main = threading.main_thread()
    left = [f"thread {thread.name!r}" for thread in threading.enumerate() if not thread.daemon and thread is not main]
    left += [f"process {child.name!r} (pid {child.pid})" for child in multiprocessing.active_children()]
    if not left and (frame := sys._current_frames().get(main.ident or 0)) is not None:  # noqa: SLF001
        [*_, place] = traceback.extract_stack(frame)
        left = [f"an exit function, at {place.filename}:{place.lineno}"]
    return ", ".join(left) or "the rank itself"
