"""Gangs that are cancelled during their start. Agents and ranks are real, in one process with the driver."""

import os
import threading
import time
from concurrent.futures import CancelledError

import pytest

from flytekitplugins.daskpytorch.driver.futures import GangFutures
from gangs import on_this_machine
from processes import num_open_files, until


def start() -> GangFutures:
    return on_this_machine(os.getpid, max_restarts=0)


def test_cancels_in_the_start_up_leave_no_agent_no_thread_and_no_file() -> None:
    others = ours()
    assert len(start().result()) == 2  # the fork server stays
    until(lambda: ours() <= others, lambda: f"the first gang's threads to end: {ours() - others}")
    files = num_open_files()
    for moment in range(8):
        futures = start()
        time.sleep(0.008 * moment)
        futures.cancel()
        if futures.exception() is not None:
            with pytest.raises(CancelledError):
                futures.result()
    until(lambda: ours() <= others, lambda: f"the threads to end: {ours() - others}")
    until(lambda: num_open_files() <= files, "the files to be closed")


def ours() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("daskpytorch-")}
