"""The terminal of debuggers in ranks, and the ports for editors. The driver finds both."""

import contextlib
import os
import re
import termios
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Self

from flytekitplugins.daskpytorch.settings import Gang

PORTS_VARIABLE = "DASKPYTORCH_DEBUGPY"
"""Environment variable with the ranks that wait for an editor's debugger, and their ports: `0:5678,1:5679`."""
RANK_AND_PORT = re.compile(r"\s*(\d{1,6}):(\d{1,5})\s*", re.ASCII)
MAX_PORT = 65_535
AT_TERMINAL = timedelta(hours=1)
"""Timeout of collectives if the driver has a terminal. Gloo's 30 minutes and NCCL's 10 are short for a person at a
debugger's prompt. A longer timeout would hide a real hang."""
IN_EDITOR = timedelta(days=7)
"""Timeout of collectives if a rank waits for an editor's debugger."""


@dataclass(frozen=True, kw_only=True)
class Terminal:
    """The terminal of the driver. A rank on the same machine can open the terminal."""

    path: str
    identity: tuple[int, ...]
    """Device numbers and inode of the terminal. Terminals of different containers differ in these numbers, even with
    equal paths."""
    settings: list[Any] = field(compare=False, repr=False)
    """Mode settings of the terminal before the gang's start. A rank that ends at its debugger's prompt leaves the
    terminal in another mode."""

    @classmethod
    def here(cls) -> Self | None:
        """Return this process's terminal. None without a terminal, or if this process runs in the background."""
        with contextlib.suppress(OSError, termios.error, ValueError):
            if os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp():
                return cls(path=os.ttyname(0), identity=_identity(0), settings=termios.tcgetattr(0))
        return None

    def open(self) -> int | None:
        """Open the terminal and return the file descriptor. None: it belongs to another machine or container."""
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:
            return None
        if _identity(descriptor) == self.identity:
            return descriptor
        os.close(descriptor)
        return None

    def restore(self) -> None:
        """Restore the terminal's settings to those before the gang."""
        with contextlib.suppress(OSError, termios.error):
            if os.tcgetpgrp(0) == os.getpgrp() and termios.tcgetattr(0) != self.settings:
                termios.tcsetattr(0, termios.TCSADRAIN, self.settings)


@dataclass(frozen=True, kw_only=True)
class Debugging:
    """The terminal and ports for debuggers in a gang's ranks."""

    terminal: Terminal | None = None
    ports: Mapping[int, int] = field(default_factory=dict)
    """Rank -> port at which the rank waits for an editor."""
    attach: str = "daskpytorch attach"
    """Command that attaches a terminal to a rank of the gang, without the rank's number."""

    @classmethod
    def here(cls) -> Self:
        """Return this process's terminal, and the editors' ports from the environment variable `DASKPYTORCH_DEBUGPY`.

        Raises:
            ValueError: `DASKPYTORCH_DEBUGPY` has a wrong format.
        """
        return cls(terminal=Terminal.here(), ports=_ports(os.environ.get(PORTS_VARIABLE, "")))

    def patience(self, settings: Gang) -> timedelta | None:
        """Return the timeout of collectives while a person may debug a rank. None means the backend's own timeout.

        Args:
            settings: Settings of the gang. After an error, ranks may wait for one that is held in a debugger.
        """
        if self.ports:
            return IN_EDITOR
        if settings.on_error == "hold":
            return AT_TERMINAL + timedelta(seconds=settings.attach_timeout)
        return AT_TERMINAL if self.terminal is not None else None


def _identity(descriptor: int) -> tuple[int, ...]:
    stat = os.fstat(descriptor)
    return (stat.st_dev, stat.st_ino, stat.st_rdev)


def _ports(text: str) -> dict[int, int]:
    if not text.strip():
        return {}
    found = [RANK_AND_PORT.fullmatch(part) for part in text.split(",")]
    ports = {int(match[1]): int(match[2]) for match in found if match is not None}
    if len(ports) != len(found) or not all(0 < port <= MAX_PORT for port in ports.values()):
        raise ValueError(
            f"{PORTS_VARIABLE}={text!r}: must be a rank and a port from 1 to {MAX_PORT}, such as 1:5678, or several "
            "with commas between them, such as 0:5678,1:5679"
        )
    return ports
