"""Ends a call of a gang that stays by `KeyboardInterrupt`, at the same collective in each rank. Runs in a rank.

A rank that leaves a call before a collective in which another rank waits would end the gang. So all ranks first halt,
or wait in a collective. Then each rank runs on until it has entered the foremost rank's newest collective.

    Ask(HALT) ──▶ halt at the next line ──▶ Answer ──▶ EndCall(at) ──▶ run on ──▶ KeyboardInterrupt
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from flytekitplugins.daskpytorch.rank import liveness, process_group
from flytekitplugins.daskpytorch.rank.link import GangLink

RETRY_WAIT = 0.01
"""Seconds until the main thread is interrupted again, if it was sending a message to the agent."""
HALT_TIME = 0.3
"""Seconds that the main thread has to halt. After that time the main thread counts as waiting in a collective."""
MAX_HALT = 30.0
"""Seconds after which a halted main thread leaves the call without the driver's answer."""


class Interrupter:
    """Interrupts one rank's calls. `halt` and `leave_at` run in the receiving thread, all else in the main thread."""

    def __init__(self, link: GangLink) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._running: int | None = None
        """Number of the call that runs now. None between calls."""
        self._last_ended = 0
        """Number of the newest call that the driver has ordered to end. 0: none."""
        self._at: int | None = None
        """Number of the collective after which the rank leaves the call. None before the driver's answer."""
        self._counted: int | None = None
        """Number of operations of the default group at the newest look into the flight recorder."""
        self._has_halted, self._has_answer = threading.Event(), threading.Event()

    def halt(self, number: int) -> int:
        """Halt in a call, or wait until the main thread waits in a collective.

        Returns:
            Number of the collective in the default process group after which the rank can leave the call at the
            earliest. 0 if unknown.
        """
        self._at = None
        self._has_answer.clear()
        self._has_halted.clear()
        with self._lock:
            self._last_ended = number
            is_running = self._running == number
        count = 0
        if is_running:
            self._signal(number)
            # A backward pass may enter several collectives before the main thread's next line.
            count = int(not self._has_halted.wait(HALT_TIME) and _is_in_backward())
        return newest + count if (newest := newest_collective()) else 0

    def leave_at(self, at: int) -> None:
        """Leave the call in which the rank has halted, after the collective with this number."""
        self._at = at
        self._has_answer.set()

    @contextlib.contextmanager
    def interruptible(self, number: int) -> Iterator[None]:
        """Let the driver interrupt the block, which runs the call with this number."""
        signal.signal(signal.SIGINT, self._heed)
        with self._lock:
            self._running, is_ended = number, self._last_ended >= number
        try:
            if is_ended:
                self._halt(None)
            yield
        finally:
            self.leave()

    def leave(self) -> None:
        """Have later interrupts no effect until the next call."""
        self._running = None
        if sys.gettrace() == self._trace:
            sys.settrace(None)

    def _signal(self, number: int) -> None:
        with self._lock:
            if self._running == number:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def _heed(self, _: int, frame: FrameType | None) -> None:
        """Handle SIGINT, but never in the middle of a message to the agent. Outside calls, SIGINT has no effect.

        A SIGINT without the driver's order is a debugger's or the user's own, and raises `KeyboardInterrupt` at once.
        """
        if (number := self._running) is None:
            return
        is_ordered = self._last_ended >= number
        if is_ordered and self._has_halted.is_set():
            return
        if self._link.is_sending:
            again = threading.Timer(RETRY_WAIT, self._signal, (number,))
            again.daemon = True
            again.start()
        elif is_ordered:
            self._halt(frame)
        else:
            raise KeyboardInterrupt

    def _halt(self, frame: FrameType | None) -> None:
        self._has_halted.set()
        self._has_answer.wait(MAX_HALT)
        self._counted = None
        if self._is_there() or sys.gettrace() is not None:  # a debugger or a coverage tool traces already
            raise KeyboardInterrupt
        while frame is not None:
            frame.f_trace = self._trace
            frame = frame.f_back
        sys.settrace(self._trace)

    def _trace(self, *_: object) -> Any:
        """Raise `KeyboardInterrupt` at the first line after the collective that the driver has named."""
        if self._running is not None and self._is_there() and not self._link.is_sending:
            sys.settrace(None)
            raise KeyboardInterrupt
        return self._trace

    def _is_there(self) -> bool:
        if self._at is None:
            return True
        if (counted := process_group.num_collectives()) == self._counted:  # a look at each line would be slow
            return False
        self._counted = counted
        return not 0 < newest_collective() < self._at


def _is_in_backward() -> bool:
    _, _, frames = liveness.stacks().rpartition("(most recent call first):")  # of the main thread
    return "torch/autograd/" in frames.strip().partition("\n")[0]


def newest_collective() -> int:
    """Return the number of the newest collective in the default process group. 0 if unknown.

    The group's own counter also counts messages between two ranks, which need not be equal in all ranks.
    """
    recalled = liveness.recall() if process_group.are_numbers_comparable() else None
    return recalled.newest_of_all if recalled is not None else 0
