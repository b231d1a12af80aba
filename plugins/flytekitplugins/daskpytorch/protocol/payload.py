"""Large calls, return values and submitted files, on their way between the driver and the ranks.

A large call is anonymous memory (`memfd_create`) of the driver, the keeper. Ranks on the driver's machine read the call
through `/proc/PID/fd`.

Large return values and submitted files travel in pieces, which the driver writes to files.
"""

from __future__ import annotations

import os
import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PIECE_SIZE = 1 << 20
"""Bytes. An agent relays a piece in milliseconds, which delays other ranks and heartbeats only briefly."""
SMALL_SIZE = 1 << 16
LARGE = 1 << 20
"""Bytes from which a pickled call is kept in shared memory."""


@dataclass(frozen=True)
class Address:
    """Address of shared memory, valid while its keeper (the process that made the memory) lives."""

    name: str
    pid: int
    descriptor: int
    size: int

    @property
    def path(self) -> Path:
        """Valid on the keeper's machine for the same user."""
        return Path(f"/proc/{self.pid}/fd/{self.descriptor}")

    @property
    def is_here(self) -> bool:
        """True on the keeper's machine. Elsewhere, the process ID may belong to another process."""
        try:
            return str(self.path.readlink()).startswith(f"/memfd:{self.name} ")
        except OSError:
            return False


class SharedMemory:
    """Keeps a large call for other processes. Raises OSError without memory."""

    def __init__(self, data: bytes) -> None:
        self._name = f"daskpytorch-{uuid.uuid4().hex}"
        self._file = os.fdopen(os.memfd_create(self._name), "wb")
        self._size = self._file.write(data)
        self._file.flush()
        self.close = weakref.finalize(self, self._file.close)

    @property
    def address(self) -> Address:
        return Address(self._name, os.getpid(), self._file.fileno(), self._size)


def address_of(call: bytes | SharedMemory) -> bytes | Address:
    return call.address if isinstance(call, SharedMemory) else call


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A value's pieces arrive in order."""

    path: str | None
    """Path in the results' folder (empty if only the task's folder must exist), or None for a return value."""
    file: str
    """Name of the value's file in a folder of the driver."""
    start: int
    """Place of the data in the file."""
    data: bytes
    is_last: bool


class PieceWriter:
    """File that passes what is written to `send`, in pieces."""

    def __init__(self, path: str | None, send: Callable[[Piece], object]) -> None:
        self._path, self._send, self._name = path, send, uuid.uuid4().hex
        self._start = 0
        self._rest = bytearray()

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), PIECE_SIZE):
            part = view[start : start + PIECE_SIZE]
            if len(self._rest) + len(part) > PIECE_SIZE:
                self._flush(is_last=False)
            self._rest += part
        return len(view)

    def end(self) -> bytes | None:
        """Send the last piece, or return the bytes of a small return value."""
        if self._path is None and self._start == 0 and len(self._rest) <= SMALL_SIZE:
            return bytes(self._rest)
        self._flush(is_last=True)
        return None

    def _flush(self, *, is_last: bool) -> None:
        data = bytes(self._rest)
        self._send(Piece(path=self._path, file=self._name, start=self._start, data=data, is_last=is_last))
        self._start += len(data)
        self._rest.clear()
