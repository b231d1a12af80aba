"""Reports a rank's signs of life, and writes the stacks of its threads. Runs in a rank."""

import contextlib
import faulthandler
import os
import threading
import time
from pathlib import Path
from typing import IO

from flytekitplugins.daskpytorch.protocol.job import DUMP_SIGNAL, MAX_STACKS, RankOrder
from flytekitplugins.daskpytorch.rank.link import GangLink


def watch(order: RankOrder, link: GangLink) -> None:
    """Start a thread that reports this rank's number of signs of life, unless the gang has no hang timeout."""
    pulse, progress = order.job.pulse, link.progress
    if pulse is None:
        return
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(lambda *_: progress.move())

    def report() -> None:
        reported = -1
        while True:
            if (num_moves := progress.num_moves) != reported:
                reported = num_moves
                link.send_moves(reported)
            time.sleep(pulse)

    threading.Thread(target=report, name="daskpytorch-pulse", daemon=True).start()


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


def show(stacks: str) -> None:
    """Write stacks to standard error, without `sys.stderr`, whose lock a hanging thread may hold."""
    with contextlib.suppress(OSError):  # standard error may be closed
        os.write(2, f"\n{stacks}".encode())


_stacks_file: IO[str] | None = None
"""File for the rank's stacks, open as long as the rank may receive SIGQUIT. None outside a rank's own process."""
