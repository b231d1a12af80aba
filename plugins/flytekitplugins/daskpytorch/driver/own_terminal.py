"""A terminal of this process, connected to a rank's debugger. Runs in the driver, and in `daskpytorch attach`.

The driver connects its own terminal as a user connects another one: by a connection to the driver's own port.
"""

import contextlib
import fcntl
import os
import select
import socket
import termios
import threading
import tty
from collections.abc import Iterator
from pathlib import Path

from flytekitplugins.daskpytorch.protocol.attaching import Attach, DriverContact, Left, Listing, Shown, Typed
from flytekitplugins.daskpytorch.protocol.framing import Connection, introduce, watch_peer
from flytekitplugins.daskpytorch.protocol.messages import Close

CONNECT_TIMEOUT = 10.0
"""Timeout, in seconds, for a driver to answer."""
LEAVE = b"\x1d"
"""Byte that a terminal in raw mode sends for Ctrl-], which disconnects the terminal."""
READ_SIZE = 1 << 12
END_TIME = 2.0
"""Timeout, in seconds, for the driver's terminal to get its mode back at the gang's end."""


class OwnTerminal:
    """The driver's own terminal, which one rank's debugger has at a time. Ctrl-C goes to that rank meanwhile."""

    def __init__(self, contact: DriverContact) -> None:
        self._contact = contact
        self._thread: threading.Thread | None = None
        """Thread of the newest prompt. None before the first one."""

    def show(self, rank: int) -> None:
        """Connect the terminal to a rank's debugger, once the prompt before is over, until this prompt is over."""
        self._thread = threading.Thread(
            target=self._serve, args=(rank, self._thread), name="daskpytorch-own-terminal", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Wait until the terminal has the mode that it had before the newest prompt."""
        if self._thread is not None:
            self._thread.join(END_TIME)

    def _serve(self, rank: int, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        with contextlib.suppress(EOFError, OSError, termios.error):  # the gang or the terminal may end at any time
            path = Path(os.ttyname(0))
            if not os.access(path, os.R_OK | os.W_OK):  # the terminal of another user, as after `su`
                path = Path("/dev/tty")
            with path.open("r+b", buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # other gangs may use the same terminal
                try:
                    self._relay(file.fileno(), rank)
                finally:
                    fcntl.flock(file, fcntl.LOCK_UN)  # a process forked meanwhile shares the lock, and may live on

    def _relay(self, terminal: int, rank: int) -> None:
        with contextlib.closing(connect(self._contact)) as connection, raw_mode(terminal):
            for said in relay(terminal, terminal, connection, rank):
                match said:
                    case Left() | Close():
                        return
                    case bytes() if not said or LEAVE in said:
                        return


def connect(contact: DriverContact) -> Connection:
    """Connect to a driver.

    Raises:
        OSError: The driver does not answer.
    """
    sock = socket.create_connection(contact.address, timeout=CONNECT_TIMEOUT)
    watch_peer(sock)
    return introduce(sock, contact.token)


def relay(
    keyboard: int, screen: int, connection: Connection, rank: int
) -> Iterator[bytes | Shown | Left | Listing | Close]:
    """Pass keys to a rank's debugger, and show its output, until the caller stops iterating.

    Args:
        keyboard: Descriptor from which keys are read. The terminal is in raw mode.
        screen: Descriptor of the same terminal, to which output is written.
        connection: Connection to the driver.
        rank: The rank.

    Yields:
        Keys before they are sent, empty at the end of the terminal, and the driver's messages after they are shown.

    Raises:
        EOFError: The driver has closed the connection.
        OSError: The connection is broken.
    """
    size, look = None, select.poll()
    for file in (keyboard, connection.fileno()):
        look.register(file, select.POLLIN)
    while True:
        if (now := os.get_terminal_size(screen)) != size:
            size = now
            connection.send(Attach(rank, (size.lines, size.columns)))
        ready = [file for file, _ in look.poll()]
        if connection.fileno() in ready:
            said = connection.recv()
            if isinstance(said, Shown):
                write(screen, said.data)
            yield said
        if keyboard in ready:
            yield (keys := os.read(keyboard, READ_SIZE))
            connection.send(Typed(rank, keys))


@contextlib.contextmanager
def raw_mode(terminal: int) -> Iterator[None]:
    """Switch a terminal to raw mode in the block: the rank's pseudo-terminal does echo and line editing."""
    before = termios.tcgetattr(terminal)
    tty.setraw(terminal, termios.TCSADRAIN)  # keeps keys that were typed before
    try:
        raw = termios.tcgetattr(terminal)
        raw[1] = before[1]  # other processes may write lines meanwhile
        termios.tcsetattr(terminal, termios.TCSANOW, raw)
        yield
    finally:
        if os.tcgetpgrp(terminal) == os.getpgrp():  # a process in the background would be stopped
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def write(terminal: int, data: bytes) -> None:
    """Write all of the data to a terminal."""
    while data:
        data = data[os.write(terminal, data) :]
