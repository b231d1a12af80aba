"""Opens what should be this process's standard streams where they are closed (`2>&-`). Runs everywhere.

Else a socket, or a rank's channel, gets the number 2, and all that C code has to say goes into it; Python has None.
"""

from __future__ import annotations

import os
import sys

__all__ = ["open_closed"]


def open_closed() -> None:
    """Have closed standard streams lead nowhere."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, f"__{name}__") is None and getattr(sys, name) is None:
            setattr(sys, name, _nowhere(number, "w" if number else "r"))


def _nowhere(number: int, mode: str) -> object:
    """The null device, at this number if nothing else has that by now."""
    found = os.open(os.devnull, os.O_RDWR)  # at the lowest number that is free
    if found == number:
        os.set_inheritable(found, True)
    return os.fdopen(found, mode, closefd=False)
