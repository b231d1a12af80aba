"""Keeps bytes for a while: a few in memory, the rest in a temporary file without a name. Runs in the driver.

Nothing is left behind, however the driver ends: the file goes with the last reference to it. Not
`tempfile.SpooledTemporaryFile`, which is for one thread and loses all where it finds the disk full.
"""

import os
import tempfile
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO

__all__ = ["Kept", "ResultBuffer"]

MAX_IN_MEMORY = 1 << 20
"""Bytes; also why a thousand small gangs do not hold a thousand files open."""


@dataclass(frozen=True)
class Kept:
    """Where something is."""

    size: int
    data: bytes = b""
    """Itself, where it is in memory."""
    file: IO[bytes] | None = None
    """Else its file ..."""
    offset: int = 0
    """... and its place there."""


class ResultBuffer:
    """Any thread may put, get and drop; a slow disk holds up only the one that puts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file: IO[bytes] | None = None
        self._end = 0
        self._num_in_file = 0
        self._in_memory = 0

    def put(self, data: bytes) -> Kept:
        """Keep some bytes; in memory after all where the disk takes no more."""
        with self._lock:
            if self._in_memory + len(data) <= MAX_IN_MEMORY:
                return self._put_in_memory(data)
        kept: Kept | None = None
        try:
            file, kept = self._reserve(len(data))
            _write_at(file.fileno(), data, kept.offset)
        except OSError:
            if kept is not None:
                self.drop([kept])
            with self._lock:
                return self._put_in_memory(data)
        return kept

    def get(self, kept: Kept) -> bytes:
        """The bytes again."""
        return kept.data if kept.file is None else os.pread(kept.file.fileno(), kept.size, kept.offset)

    def drop(self, several: Iterable[Kept]) -> None:
        """Forget some; the file ends with the last that is in it."""
        with self._lock:
            for kept in several:
                if kept.file is None:
                    self._in_memory -= kept.size
                else:
                    self._num_in_file -= 1
            if self._num_in_file == 0 and self._file is not None:
                self._file.close()
                self._file, self._end = None, 0

    def _put_in_memory(self, data: bytes) -> Kept:
        self._in_memory += len(data)
        return Kept(len(data), data)

    def _reserve(self, size: int) -> tuple[IO[bytes], Kept]:
        with self._lock:
            if self._file is None:
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
            kept = Kept(size, file=self._file, offset=self._end)
            self._end += size
            self._num_in_file += 1
            return self._file, kept


def _write_at(file: int, data: bytes, offset: int) -> None:
    rest = memoryview(data)
    while rest:
        count = os.pwrite(file, rest, offset)
        rest, offset = rest[count:], offset + count
