"""Messages of terminals that attach to a gang's ranks, and the file by which a terminal finds the gang's driver.

A terminal is a process of `daskpytorch attach`. Each agent leaves the driver's address and the gang's token in its own
folder, which only this user can open.

    terminal                driver              agent               rank
      │ ─── Look ───────────▶ │ ─── Tell(Ask) ────▶ │ ─── Ask ──────▶ │
      │ ◀── Listing ───────── │ ◀── Reported ────── │ ◀── Answer ──── │
      │                       │ ◀── Reported ────── │ ◀── Awaits ──── │ its debugger has a pseudo-terminal
      │ ─── Attach ─────────▶ │ ─── Tell ─────────▶ │ ─── Attach ───▶ │
      │ ◀── Shown ─────────── │ ◀── Reported ────── │ ◀── Shown ───── │ output
      │ ─── Typed ──────────▶ │ ─── Tell ─────────▶ │ ─── Typed ────▶ │ input
      │ ◀── Left ──────────── │ ◀── Reported ────── │ ◀── LeftPrompt  │ its function goes on, or ends
"""

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flytekitplugins.daskpytorch.process.folders import remove_abandoned

FILE = "driver.json"


# ---- Between terminal and driver


@dataclass(frozen=True)
class Look:
    """A terminal's first message: request for the list of ranks."""

    rank: int | None = None
    """Rank whose stacks the list has. None: the list has no stacks."""


@dataclass(frozen=True)
class RankPlace:
    """A rank in the list for a terminal."""

    rank: int
    host: str
    step: int | None
    """Newest logged step. None before the first call of `log`."""
    state: str
    """State in words, such as `runs` or `stops at train.py:12`."""
    awaits: bool
    """True if the rank's debugger waits for a terminal."""
    line: str
    """Innermost line of the user's code in the main thread. Empty if unknown."""
    stack: str
    """Stacks of all threads, the main thread last. Empty if unknown, or if the terminal has named another rank."""


@dataclass(frozen=True)
class Listing:
    """The driver's answer to `Look`."""

    gang: str
    """Name of the gang's function."""
    id: str
    """Id that tells the gang from others of the same function."""
    ranks: Sequence[RankPlace]
    """Empty while the gang waits for workers."""


@dataclass(frozen=True)
class Attach:
    """Request to connect a terminal to a rank's debugger. Also sent to the rank, and again when the size changes."""

    rank: int
    size: tuple[int, int]
    """Lines and columns of the terminal."""


@dataclass(frozen=True)
class Typed:
    """Keys that the user has pressed at an attached terminal. Also sent to the rank."""

    rank: int
    data: bytes


@dataclass(frozen=True)
class Shown:
    """Output of a rank's debugger. Also a report of the rank."""

    data: bytes


@dataclass(frozen=True)
class Left:
    """Notice to a terminal: the rank has left its debugger, and goes on or ends."""


FromTerminal = Look | Attach | Typed


# ---- Between driver and rank


@dataclass(frozen=True)
class Detach:
    """Notice to a rank: no terminal is attached any more."""

    rank: int


@dataclass(frozen=True)
class Awaits:
    """Report that a rank's debugger waits for a terminal. The rank cannot count as hung until it leaves the prompt."""

    state: str
    """Reason, which the driver shows after the words `rank N`."""
    timeout: float
    """Seconds without a terminal until the rank gives up."""


TerminalOrder = Attach | Typed | Detach


# ---- The driver's address


@dataclass(frozen=True)
class DriverContact:
    """Address of a gang's driver, and the gang's token."""

    address: tuple[str, int]
    token: bytes = field(repr=False)


def leave_contact(folder: Path, contact: DriverContact) -> None:
    """Write a file by which this user's terminals find the driver.

    Args:
        folder: The agent's scratch folder, which only this user can open.
        contact: The driver.
    """
    with contextlib.suppress(OSError):  # a full disk: nobody can attach, and the gang trains
        (path := folder / FILE).touch(mode=0o600)
        path.write_text(json.dumps({"address": contact.address, "token": contact.token.hex()}))


def find_contacts() -> set[DriverContact]:
    """Return the drivers of all gangs that have agents of this user on this machine."""
    place = tempfile.gettempdir()
    remove_abandoned(place)  # with the files of killed agents
    found = set()
    for path in Path(place).glob(f"daskpytorch-*/{FILE}"):
        with contextlib.suppress(OSError, ValueError):
            found.add(_contact_in(path.parent))
    return found


def _contact_in(folder: Path) -> DriverContact:
    """Return the driver that a folder names. The checked folder is the one that is read, also if others swap links.

    Raises:
        OSError: The folder has no such file.
        PermissionError: Others can open the folder. They may have put the file there, to get this user's keys.
        ValueError: The file is incomplete.
    """
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(opened)
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise PermissionError(f"{folder} is not this user's alone")
        with os.fdopen(os.open(FILE, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=opened), encoding="utf-8") as file:
            said = json.load(file)
    finally:
        os.close(opened)
    host, port = said["address"]
    return DriverContact((host, port), bytes.fromhex(said["token"]))
