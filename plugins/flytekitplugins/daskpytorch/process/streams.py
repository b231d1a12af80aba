"""Standard streams, and texts that are fit to be shown there. Runs everywhere."""

import contextlib
import os
import re
import sys
from typing import IO, Any

__all__ = ["Screen", "one_line", "open_closed", "without_secrets"]

SECRET = re.compile(
    r"(?i)^token$|(^|_)(secret|password|passwd|credentials?|storage_options"
    r"|(api|access|secret|private)_?key(_id)?|(api|auth|access|session|bearer|hf)_?token)$"
)
"""Not the names of hyper-parameters such as num_tokens or pad_token."""
HIDDEN = "(hidden)"


def open_closed() -> None:
    """Have standard streams lead nowhere that are closed here (`2>&-`).

    Else a socket, or a rank's channel, gets the number 2, and all that C code has to say goes into it; Python has None.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, f"__{name}__") is None and getattr(sys, name) is None:
            setattr(sys, name, _nowhere(number, "w" if number else "r"))


def _nowhere(number: int, mode: str) -> object:
    """The null device, at this number if nothing else has that by now."""
    found = os.open(os.devnull, os.O_RDWR)  # at the lowest number that is free
    if found == number:
        os.set_inheritable(found, True)
    return os.fdopen(found, mode, closefd=False)


class Screen:
    """Standard error; what cannot be written to it is left out: it may be closed, a full disk or a broken pipe.

    No training ends because of what is shown of it.
    """

    def __init__(self) -> None:
        self._file: IO[str] | None = sys.stderr

    def write(self, text: str) -> int:
        """Write as far as possible."""
        with contextlib.suppress(OSError, ValueError):
            if self._file is not None:
                self._file.write(text)
        return len(text)

    def flush(self) -> None:
        """Send what waits, as far as possible."""
        with contextlib.suppress(OSError, ValueError):
            if self._file is not None:
                self._file.flush()

    def __getattr__(self, name: str) -> object:
        """Whether it is a terminal, its encoding and the like."""
        return getattr(self._file, name)


def one_line(text: str, max_length: int) -> str:
    """A text without what a terminal obeys (each such character is replaced), cut where it is too long."""
    cut = text if len(text) <= max_length else f"{text[: max_length - 1]}…"
    return (
        cut
        if cut.isprintable()
        else "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in cut)
    )


def without_secrets(value: Any) -> Any:
    """The same, with `(hidden)` in place of whatever a dictionary in it has under such a name."""
    if isinstance(value, list):
        return [without_secrets(item) for item in value]
    if isinstance(value, dict):
        return {name: HIDDEN if SECRET.search(str(name)) else without_secrets(item) for name, item in value.items()}
    return value
