"""Debuggers in ranks: the terminal that they talk to, the ports that editors attach to. Found in the driver."""

import contextlib
import os
import re
import termios
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Self

PORTS_VARIABLE = "DASKPYTORCH_DEBUGPY"
"""Which ranks wait for an editor's debugger before they begin, and at which port each: `1:5678`, or `0:5678,1:5679`."""
RANK_AND_PORT = re.compile(r"\s*(\d{1,6}):(\d{1,5})\s*", re.ASCII)
MAX_PORT = 65_535
AT_TERMINAL = timedelta(hours=1)
"""Gloo's own half an hour, and NCCL's ten minutes, are soon over; but a run at a terminal may just as well hang."""
IN_EDITOR = timedelta(days=7)


@dataclass(frozen=True, kw_only=True)
class Terminal:
    """The one that this process was started in, which a rank may open where it is on the same machine."""

    path: str
    identity: tuple[int, ...]
    """What tells it from one of the same name in another container."""
    settings: list[Any] = field(compare=False, repr=False)
    """As it is now; a rank that is ended at its prompt leaves it otherwise."""

    @classmethod
    def here(cls) -> Self | None:
        """That of this process; None where it has none, or somebody else is being listened to there."""
        with contextlib.suppress(OSError, termios.error, ValueError):
            if os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp():
                return cls(path=os.ttyname(0), identity=_identity(0), settings=termios.tcgetattr(0))
        return None

    def open(self) -> int | None:
        """A descriptor to read from and write to; None where it is not here."""
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:
            return None
        if _identity(descriptor) == self.identity:
            return descriptor
        os.close(descriptor)
        return None

    def restore(self) -> None:
        """Have it as it was."""
        with contextlib.suppress(OSError, termios.error):
            if os.tcgetpgrp(0) == os.getpgrp() and termios.tcgetattr(0) != self.settings:
                termios.tcsetattr(0, termios.TCSADRAIN, self.settings)


@dataclass(frozen=True, kw_only=True)
class Debugging:
    """How a gang's ranks may be debugged."""

    terminal: Terminal | None = None
    ports: Mapping[int, int] = field(default_factory=dict)
    """Rank -> where it waits for an editor."""

    @classmethod
    def here(cls) -> Self:
        """As this process and its environment have it.

        Raises:
            ValueError: The environment names no ranks and ports.
        """
        return cls(terminal=Terminal.here(), ports=_ports(os.environ.get(PORTS_VARIABLE, "")))

    @property
    def patience(self) -> timedelta | None:
        """How long collectives wait for a rank that somebody may look at; None: as long as they usually do."""
        if self.ports:
            return IN_EDITOR
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
