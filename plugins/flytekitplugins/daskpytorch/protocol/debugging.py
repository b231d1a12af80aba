"""The driver's terminal for debuggers in ranks, and the ports for editors. The driver finds both."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Self

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
class Debugging:
    """The driver's terminal and the ports for debuggers in a gang's ranks."""

    has_terminal: bool = False
    """True if the driver has a terminal, which one rank's debugger has at a time."""
    ports: Mapping[int, int] = field(default_factory=dict)
    """Rank -> port at which the rank waits for an editor."""
    attach: str = "daskpytorch attach"
    """Command that attaches a terminal to a rank of the gang, without the rank's number."""

    @classmethod
    def here(cls) -> Self:
        """Find this process's terminal, and the editors' ports from the environment variable `DASKPYTORCH_DEBUGPY`.

        Raises:
            ValueError: `DASKPYTORCH_DEBUGPY` has a wrong format.
        """
        return cls(has_terminal=_has_terminal(), ports=_ports(os.environ.get(PORTS_VARIABLE, "")))

    def patience(self, settings: Gang) -> timedelta | None:
        """Return the timeout of collectives while a person may debug a rank. None means the backend's own timeout.

        Args:
            settings: Settings of the gang. After an error, ranks may wait for one that is held in a debugger.
        """
        if self.ports:
            return IN_EDITOR
        if settings.on_error == "hold":
            return AT_TERMINAL + timedelta(seconds=settings.attach_timeout)
        return AT_TERMINAL if self.has_terminal else None


def _has_terminal() -> bool:
    """Return True if this process can open the terminal at its standard input, and does not run in the background."""
    try:
        return bool(os.ttyname(0)) and os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


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
