"""Standard error as the displays write to it, and texts that are fit for a line there. Runs in driver and rank 0."""

from __future__ import annotations

import contextlib
import sys
from typing import IO

__all__ = ["Screen", "one_line"]


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
