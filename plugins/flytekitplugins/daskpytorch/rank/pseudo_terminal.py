"""Pseudo-terminal of a rank's debugger, and the socket at which terminals attach to it. Runs in a rank.

pdb, readline and the user's own `input()` work as at any terminal. One terminal is attached at a time.
"""

import contextlib
import fcntl
import os
import signal
import socket
import termios
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path

from flytekitplugins.daskpytorch.protocol.debugging import DRIVER, READ_SIZE, listen

INTERRUPT = b"\x03"
"""Byte that a terminal in raw mode sends for Ctrl-C."""
MAX_TAIL = 1 << 14
"""Number of bytes of a prompt's newest output that are kept."""
KEPT_FOR = 1.0
"""Seconds that a rank whose debugger steps keeps the driver's terminal. A step over a collective may need another
rank."""
LOOK_INTERVAL = 1.0
"""Seconds between two checks whether a terminal is attached."""
MAX_STALL = 1.0
"""Seconds after which a terminal that does not read is dropped, and for which a prompt's end waits for its output."""


class PseudoTerminal:
    """Terminal without a screen, which a thread serves to the terminal that is attached."""

    is_at_prompt = False
    is_given_up = False
    """True once this terminal has hung up: no terminal was attached in time, or the driver ends the call. Reads then
    get the end of the file, and writes fail."""

    def __init__(self, folder: Path, rank: int, timeout: float, is_call_ending: Callable[[], bool]) -> None:
        """Open the terminal, and wait for terminals.

        Args:
            folder: The folder of the rank's agent.
            rank: The rank.
            timeout: Seconds at a prompt without an attached terminal after which this terminal hangs up.
            is_call_ending: Returns True if the driver ends the present call, with its prompts.
        """
        self._timeout = timeout
        self._is_call_ending = is_call_ending
        self._master, self.slave = os.openpty()
        os.set_blocking(self._master, False)  # keys beyond the kernel's buffer are lost
        modes = termios.tcgetattr(self.slave)
        modes[1] &= ~termios.OPOST  # the attached terminal does it
        modes[3] |= termios.NOFLSH  # else Ctrl-C also discards output, at times that of the next prompt
        termios.tcsetattr(self.slave, termios.TCSANOW, modes)
        self._listener = listen(folder, rank)
        self._attached: socket.socket | None = None
        self._screen = -1
        """Descriptor of the attached terminal, from which its size is read."""
        self._is_drivers = False
        self._tail = b""
        """Newest output of the present prompt, which a terminal gets when it attaches."""
        self._since = 0.0
        """Time of the prompt's begin or end, or at which a terminal was last seen attached."""
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._close)  # a child must not keep the terminal open
        threading.Thread(target=self._serve, name="daskpytorch-terminal", daemon=True).start()

    @contextlib.contextmanager
    def prompt(self) -> Iterator[bool]:
        """In the block, wait for a terminal. Yield True if one is attached. After the block, wait for its output."""
        with self._lock:
            self.is_at_prompt, self._since, self._tail = True, time.monotonic(), b""
            is_attached = self._attached is not None
        try:
            yield is_attached
        finally:
            self.is_at_prompt, self._since = False, time.monotonic()
            if not self.is_given_up:
                wait_until_read(self._master)

    def leave(self) -> None:
        """Detach the driver's terminal, as the next prompt may take long."""
        with self._lock:
            if self._is_drivers:
                self._detach()

    # ---- in the thread of this terminal

    def _serve(self) -> None:
        while not self.is_given_up:
            attached = [self._attached] if self._attached is not None else []
            ready = wait([self._listener, self._master, *attached], min(LOOK_INTERVAL, self._timeout))
            with self._lock:
                if self._attached is not None and self._attached in ready:
                    self._take_keys(self._attached)
                if self._listener in ready:
                    self._welcome()
                if self._master in ready:
                    self._show(os.read(self._master, READ_SIZE))
                self._keep_time(time.monotonic())
        self._detach()
        self._close()

    def _keep_time(self, now: float) -> None:
        if self.is_at_prompt:
            self._since = now if self._attached is not None else self._since
            self.is_given_up = self._is_call_ending() or now >= self._since + self._timeout
        elif self._is_drivers and now >= self._since + KEPT_FOR:
            self._detach()

    def _welcome(self) -> None:
        attaching, _ = self._listener.accept()
        attaching.settimeout(MAX_STALL)
        try:
            who, [screen], *_ = socket.recv_fds(attaching, 1, 1)
        except (OSError, ValueError):
            attaching.close()
            return
        self._detach()
        self._attached, self._screen, self._is_drivers = attaching, screen, who == DRIVER
        self._resize()
        tail, self._tail = self._tail, b""
        self._show(tail)

    def _take_keys(self, attached: socket.socket) -> None:
        keys = b""
        with contextlib.suppress(OSError):
            keys = attached.recv(READ_SIZE)
        if not keys or (INTERRUPT in keys and not self.is_at_prompt):
            self._detach()
            return
        self._resize()
        with contextlib.suppress(OSError):
            os.write(self._master, keys)
        if INTERRUPT in keys:  # no process group belongs to this terminal
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def _show(self, output: bytes) -> None:
        self._tail = (self._tail + output)[-MAX_TAIL:]
        if self._attached is not None:
            try:
                self._attached.sendall(output)
            except OSError:
                self._detach()

    def _resize(self) -> None:
        with contextlib.suppress(OSError):  # the attached terminal is gone
            size = fcntl.ioctl(self._screen, termios.TIOCGWINSZ, bytes(8))
            fcntl.ioctl(self._master, termios.TIOCSWINSZ, size)

    def _detach(self) -> None:
        """Hang up on the attached terminal. Its socket is closed once no thread waits for its keys."""
        if self._attached is not None:
            with contextlib.suppress(OSError):
                self._attached.shutdown(socket.SHUT_RDWR)
            os.close(self._screen)
            self._attached, self._is_drivers = None, False

    def _close(self) -> None:
        """Close what this process has open, and leave the attached terminal to the rank, if this process is a fork."""
        if self._attached is not None:
            self._attached.close()
        self._listener.close()
        if self._master >= 0:
            os.close(self._master)
            self._master = -1


def wait_until_read(descriptor: int) -> None:
    """Wait until the reader has taken what was written to this pipe or terminal, for at most `MAX_STALL` seconds."""
    deadline = time.monotonic() + MAX_STALL
    with contextlib.suppress(OSError):
        while any(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4))) and time.monotonic() < deadline:
            time.sleep(0.005)
