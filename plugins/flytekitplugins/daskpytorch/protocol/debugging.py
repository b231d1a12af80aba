"""Debuggers in ranks: the driver's settings for them, and the way from a terminal to a rank's debugger.

A terminal is the driver's own, or one with the command `daskpytorch attach`, on the rank's machine.

    terminal                                      rank, in the folder of its agent, which only this user can open
      │ ─── connection ─────────────────────────▶ │ socket `debugger-1`, accepted at the rank's next prompt
      │ ◀── pseudo-terminal of pdb ────────────── │
      │ ◀── a byte for each prompt and step ───── │
      │ ─── SIGINT for each Ctrl-C at a prompt ─▶ │
      │ ◀── end of the connection ─────────────── │ goes on

The terminal's process passes keys and output on between terminal and pseudo-terminal.
"""

import contextlib
import fcntl
import json
import os
import re
import signal
import socket
import stat
import struct
import tempfile
import termios
import tty
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Self

from flytekitplugins.daskpytorch.process.folders import replacing
from flytekitplugins.daskpytorch.settings import Gang

PORTS_VARIABLE = "DASKPYTORCH_DEBUGPY"
"""Ranks that wait for an editor's debugger, and their ports: `0:5678,1:5679`."""
RANKS_AND_PORTS = re.compile(r"(?:^|,)\s*(\d{1,6}):(\d{1,5})\s*(?=,|$)", re.ASCII)
MAX_PORT = 65_535
AT_TERMINAL = timedelta(hours=1)
"""Timeout of collectives if the driver has a terminal. Gloo's 30 minutes and NCCL's 10 are short for a person at a
debugger's prompt, and a longer timeout would hide a real hang."""
IN_EDITOR = timedelta(days=7)
PROMPT, STEPS = b"p", b"s"
KEPT_FOR = 1.0
"""Seconds that a stepping rank keeps a terminal, as a step over a collective may need another rank."""
LEAVE = b"\x1d"
"""Ctrl-] in raw mode, by which the user leaves a rank at its prompt."""
INTERRUPT = b"\x03"
READ_SIZE = 1 << 14


@dataclass(frozen=True, kw_only=True)
class Debugging:
    has_terminal: bool = False
    ports: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def here(cls) -> Self:
        return cls(has_terminal=has_terminal(), ports=_ports(os.environ.get(PORTS_VARIABLE, "")))

    def patience(self, settings: Gang) -> timedelta | None:
        """Return the timeout of collectives while a person may debug a rank, or None for the backend's own."""
        if self.ports:
            return IN_EDITOR
        if settings.on_error == "hold":
            return AT_TERMINAL + timedelta(seconds=settings.attach_timeout)
        return AT_TERMINAL if self.has_terminal else None


def _ports(text: str) -> dict[int, int]:
    found = RANKS_AND_PORTS.findall(text)
    ports = {int(rank): int(port) for rank, port in found if 0 < int(port) <= MAX_PORT}
    if len(ports) != (text.count(",") + 1 if text.strip() else 0):
        raise ValueError(
            f"{PORTS_VARIABLE}={text!r}: must be a rank and a port from 1 to {MAX_PORT}, such as 1:5678, or several "
            "with commas between them, such as 0:5678,1:5679"
        )
    return ports


# ---- The agent's folder


@dataclass(frozen=True, kw_only=True)
class RankFile:
    gang: str
    rank: int
    pid: int
    prompt: str = ""
    """Why the debugger waits for a terminal, such as `stops at train.py:12`, or empty if it does not."""

    def write(self, folder: Path) -> None:
        """On a full disk there is no file, and the rank trains."""
        path = folder / f"rank-{self.rank}.json"
        with contextlib.suppress(OSError), replacing(path, path.with_suffix(".new")) as unfinished:
            unfinished.write_text(json.dumps(asdict(self)))


def find_ranks() -> list[tuple[Path, RankFile]]:
    found = []
    for folder in sorted(Path(tempfile.gettempdir()).glob("daskpytorch-*")):
        with contextlib.suppress(OSError, ValueError, TypeError), _private(folder) as opened:
            files = [RankFile(**json.loads(path.read_text())) for path in sorted(Path(opened).glob("rank-*.json"))]
            found += [(folder, file) for file in files if Path(f"/proc/{file.pid}").exists()]
    return found


@contextlib.contextmanager
def _private(folder: Path) -> Iterator[str]:
    """Yield a path of the opened folder, even if others put a link in its place.

    Raises PermissionError if others can open the folder: they may have made it, to get this user's keys.
    """
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(opened)
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise PermissionError(f"{folder} is not this user's alone")
        yield f"/proc/self/fd/{opened}"  # also shorter than the 107 characters of a socket's address
    finally:
        os.close(opened)


def listen(folder: Path, rank: int) -> socket.socket:
    (folder / f"debugger-{rank}").unlink(missing_ok=True)  # of the rank before a restart
    listener = socket.socket(socket.AF_UNIX)
    with _private(folder) as opened:
        listener.bind(f"{opened}/debugger-{rank}")
    listener.listen()
    return listener


# ---- The terminal


def has_terminal() -> bool:
    """Return True if standard input is a terminal, with this process in the foreground."""
    with contextlib.suppress(OSError):
        return os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()
    return False


def talk(folder: Path, rank: int) -> bool:
    """Attach this terminal to a rank's debugger, from the rank's next prompt until the rank goes on.

    Return True if the user has left by Ctrl-], or the terminal is gone. Raises OSError if the rank has ended, or has
    yet to call a debugger.
    """
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.socket(socket.AF_UNIX))
        with _private(folder) as opened:
            connection.connect(f"{opened}/debugger-{rank}")
        _, keyboards, *_ = socket.recv_fds(connection, 1, 1)
        if not keyboards:
            raise ConnectionResetError("the rank has ended")
        stack.callback(os.close, keyboards[0])
        modes = termios.tcgetattr(0)
        tty.setraw(0)
        stack.callback(termios.tcsetattr, 0, termios.TCSADRAIN, modes)
        with contextlib.suppress(OSError, termios.error):
            return _pass_on(connection, keyboards[0])
    return not has_terminal()


def _pass_on(connection: socket.socket, keyboard: int) -> bool:
    pid, *_ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    state = PROMPT
    while ready := wait([0, keyboard, connection], KEPT_FOR if state == STEPS else None):
        fcntl.ioctl(keyboard, termios.TIOCSWINSZ, fcntl.ioctl(0, termios.TIOCGWINSZ, bytes(8)))
        if keyboard in ready:
            output = os.read(keyboard, READ_SIZE)
            while output:
                output = output[os.write(0, output) :]
        elif connection in ready and not (state := connection.recv(1)):
            return False
        if 0 in ready:
            if not (keys := os.read(0, READ_SIZE)) or LEAVE in keys:
                return True
            if INTERRUPT not in keys:
                os.write(keyboard, keys)
            elif state == PROMPT:  # no process group belongs to the pseudo-terminal
                os.kill(pid, signal.SIGINT)
            else:
                return False
    return False
