"""Pseudo-terminal of a rank's debugger, for terminals that attach from elsewhere. Runs in a rank.

pdb, readline and the user's own `input()` work as at any terminal. Output and keys travel as messages, by way of agent
and driver.
"""

import contextlib
import fcntl
import os
import select
import signal
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from flytekitplugins.daskpytorch.protocol.attaching import Attach, Detach, Shown, TerminalOrder

INTERRUPT = b"\x03"
"""Byte that a terminal in raw mode sends for Ctrl-C."""
CHUNK = 1 << 14
"""Maximum number of bytes of output in one message."""
LOOK_INTERVAL = 1.0
"""Seconds between two checks whether a terminal is attached."""
END_TIME = 1.0
"""Timeout, in seconds, for the rest of a prompt's output. A process that the user has started may keep it open."""


@dataclass(eq=False)
class OpenTerminal:
    """Terminal of one prompt."""

    master: int
    """Descriptor through which keys get to the debugger."""
    slave: int
    """Descriptor that the debugger reads and writes."""
    is_given_up: bool = False
    """True once the terminal has hung up: no terminal was attached in time, or the driver ends the call."""


class PseudoTerminal:
    """Terminal without a screen. `follow` runs in the thread that receives orders, all else in the main thread."""

    def __init__(self, send: Callable[[Shown], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._open: OpenTerminal | None = None
        """Terminal of the prompt that is shown now. None while no prompt is shown."""
        self._size = (24, 80)
        self._is_attached = False
        self.is_call_ending = False
        """True if the driver ends the present call of a gang that stays. Prompts then hang up within a second."""

    def follow(self, order: TerminalOrder) -> None:
        """Follow an order of an attached terminal."""
        match order:
            case Attach(size=size):
                self._is_attached, self._size = True, size
                self._resize()
            case Detach():
                self._is_attached = False
            case _:
                self._type(order.data)

    @contextlib.contextmanager
    def opened(self, timeout: float) -> Iterator[OpenTerminal]:
        """Yield a new terminal, and send the driver what is written there.

        Args:
            timeout: Seconds without an attached terminal after which this terminal hangs up: reads get the end of the
                file, and writes fail.
        """
        master, slave = os.openpty()
        os.set_blocking(master, False)  # keys beyond the kernel's buffer are lost: orders of the driver must not wait
        modes = termios.tcgetattr(slave)
        modes[3] |= termios.NOFLSH  # else Ctrl-C also discards output, at times that of the next prompt
        termios.tcsetattr(slave, termios.TCSANOW, modes)
        self._open = terminal = OpenTerminal(master, slave)
        self._resize()
        relay = threading.Thread(target=self._relay, args=(terminal, timeout), name="daskpytorch-terminal", daemon=True)
        relay.start()
        try:
            yield terminal
        finally:
            os.close(slave)
            relay.join(END_TIME)

    def _relay(self, terminal: OpenTerminal, timeout: float) -> None:
        look = select.poll()
        look.register(terminal.master, select.POLLIN)
        give_up_at = time.monotonic() + timeout
        try:
            while not terminal.is_given_up:
                if look.poll(1000 * min(LOOK_INTERVAL, timeout)):
                    self._send(
                        Shown(os.read(terminal.master, CHUNK))
                    )  # an OSError once the debugger has closed its end
                if self._is_attached:
                    give_up_at = time.monotonic() + timeout
                terminal.is_given_up = self.is_call_ending or time.monotonic() >= give_up_at
        except OSError:
            pass
        finally:
            with self._lock:
                if self._open is terminal:  # else a process of an earlier prompt has kept that terminal open until now
                    self._open = None
                os.close(terminal.master)

    def _type(self, data: bytes) -> None:
        with self._lock, contextlib.suppress(OSError):
            if self._open is not None:
                os.write(self._open.master, data)
                if INTERRUPT in data:  # no process group belongs to this terminal
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def _resize(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            if self._open is not None:
                fcntl.ioctl(self._open.master, termios.TIOCSWINSZ, struct.pack("4H", *self._size, 0, 0))
