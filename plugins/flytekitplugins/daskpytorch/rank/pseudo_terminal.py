"""Pseudo-terminal of a rank's debugger, to which terminals attach, one at a time. Runs in a rank.

pdb, readline and the user's own `input()` work as at any terminal. The attached terminal's process serves the
pseudo-terminal: it passes keys and output on, and can come and go without the rank's notice.
"""

import contextlib
import fcntl
import os
import signal
import socket
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path

from flytekitplugins.daskpytorch.protocol.debugging import DRIVER, INTERRUPT, listen

KEPT_FOR = 1.0
"""Seconds that a rank whose debugger steps keeps the driver's terminal. A step over a collective may need another
rank."""
LOOK_INTERVAL = 0.5
"""Seconds between two checks whether a terminal is attached."""
GREET_TIME = 1.0
"""Timeout, in seconds, for a process to say which terminal it attaches."""
MAX_STALL = 1.0
"""Maximum number of seconds for which a prompt's begin and end wait until output was read."""
END_INPUT = b"\x15\x04"
"""Keys Ctrl-U and Ctrl-D, by which a prompt reads the end of the file."""


class PseudoTerminal:
    """Terminal without a screen, which the process of the attached terminal serves."""

    is_given_up = False
    """True if the prompt was ended: no terminal was attached in time, or the driver ends the call."""

    def __init__(self, folder: Path, rank: int, timeout: float, is_call_ending: Callable[[], bool]) -> None:
        """Wait for terminals, in a thread.

        Args:
            folder: The folder of the rank's agent.
            rank: The rank.
            timeout: Seconds at a prompt without an attached terminal after which the prompt is ended.
            is_call_ending: Returns True if the driver ends the present call, with its prompts.
        """
        self._rank = rank
        self._timeout = timeout
        self._is_call_ending = is_call_ending
        self._master, self._slave = os.openpty()
        os.set_blocking(self._master, False)  # keys beyond the kernel's buffer are lost
        self._listener = listen(folder, rank)
        self._attached: socket.socket | None = None
        self._is_drivers = False
        self._is_at_prompt = False
        self._is_read = False
        """True if a terminal has shown the present prompt. A terminal that takes its place gets the prompt anew."""
        self._since = 0.0
        """Time of the prompt's begin or end, or at which a terminal was last seen attached."""
        threading.Thread(target=self._serve, name="daskpytorch-terminal", daemon=True).start()

    @property
    def is_attached(self) -> bool:
        """True if a terminal is attached."""
        return self._attached is not None

    @contextlib.contextmanager
    def prompt(self) -> Iterator[None]:
        """Use this terminal as standard input, output and error in the block."""
        _flush_output()
        _wait_until_read(1)  # the agent shows the rank's earlier output before the prompt
        kept = [os.dup(number) for number in range(3)]
        for number in range(3):
            os.dup2(self._slave, number)
        self.is_given_up, self._is_read = False, self.is_attached
        self._since, self._is_at_prompt = time.monotonic(), True
        try:
            yield
        finally:
            self._is_at_prompt, self._since = False, time.monotonic()
            _flush_output()
            if self.is_attached:
                _wait_until_read(self._master)
            for number, descriptor in enumerate(kept):
                os.dup2(descriptor, number)
                os.close(descriptor)

    def leave(self) -> None:
        """Detach the driver's terminal, as the next prompt may take long."""
        if self._is_drivers:
            self._hang_up()

    def _hang_up(self) -> None:
        attached, self._attached = self._attached, None
        if attached is not None:
            with contextlib.suppress(OSError):  # the terminal's process has ended
                attached.shutdown(socket.SHUT_RDWR)

    # ---- in the thread of this terminal

    def _serve(self) -> None:
        while True:
            attached = self._attached
            ready = wait([self._listener, *([attached] if attached is not None else [])], LOOK_INTERVAL)
            if self._listener in ready:
                self._welcome()
            elif attached is not None and attached in ready:
                self._heed(attached)
            self._keep_time(time.monotonic())

    def _welcome(self) -> None:
        attaching, _ = self._listener.accept()
        attaching.settimeout(GREET_TIME)
        with contextlib.suppress(OSError):
            is_drivers = attaching.recv(1) == DRIVER
            if is_drivers and self.is_attached:  # a user was faster
                attaching.close()
                return
            self._hang_up()
            socket.send_fds(attaching, [DRIVER], [self._master])
            if self._is_read:
                os.write(self._slave, f"(Pdb rank {self._rank}) ".encode())
            self._attached, self._is_drivers, self._is_read = attaching, is_drivers, True

    def _heed(self, attached: socket.socket) -> None:
        """Interrupt the main thread at Ctrl-C. Detach a terminal that has left, or a running rank's at Ctrl-C."""
        key = b""
        with contextlib.suppress(OSError):
            key = attached.recv(1)
        if key == INTERRUPT and self._is_at_prompt:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        else:
            self._hang_up()

    def _keep_time(self, now: float) -> None:
        if not self._is_at_prompt:
            if self._is_drivers and now >= self._since + KEPT_FOR:
                self._hang_up()
            return
        self._since = now if self.is_attached else self._since
        if self._is_call_ending() or now >= self._since + self._timeout:
            self.is_given_up = True
            with contextlib.suppress(BlockingIOError):
                os.write(self._master, END_INPUT)


def _flush_output() -> None:
    """Flush `sys.stdout` and `sys.stderr`."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _wait_until_read(descriptor: int) -> None:
    """Wait until the reader has taken what was written to this pipe or terminal, for at most `MAX_STALL` seconds."""
    deadline = time.monotonic() + MAX_STALL
    with contextlib.suppress(OSError):
        while any(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4))) and time.monotonic() < deadline:
            time.sleep(0.005)
