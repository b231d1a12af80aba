"""Large calls, return values and submitted files, on their way between the driver and the ranks.

A pickled value has parts: the pickle, and the memory of each large array and tensor (`pickling.put_apart`).

A large call is anonymous memory (`memfd_create`) of the driver or an agent, the keeper. The node's ranks map it through
`/proc/PID/fd`, so that their writes stay private.

Large return values and submitted files travel in pieces, which the driver writes to files. The driver maps a return
value's file, and deletes its name at once.
"""

from __future__ import annotations

import mmap
import os
import uuid
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

PIECE_SIZE = 1 << 20
"""Bytes. An agent relays a piece in milliseconds, which delays other ranks and heartbeats only briefly."""
SMALL_SIZE = 1 << 16
Segment = tuple[int, int]
"""Start of a part in a file, a multiple of the page size, and its size in bytes."""
Bytes = bytes | memoryview


# ---- In files


def write_parts(file: IO[bytes], parts: Sequence[Bytes]) -> tuple[Segment, ...]:
    """OSError: for example, the disk is full."""
    segments = _segments(parts)
    for (start, _), part in zip(segments, parts, strict=True):
        file.seek(start)
        file.write(part)
    file.flush()
    return segments


def _segments(parts: Sequence[Bytes]) -> tuple[Segment, ...]:
    segments, end = list[Segment](), 0
    for part in parts:  # each begins at the start of a memory page
        start = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
        end = start + len(part)
        segments.append((start, len(part)))
    return tuple(segments)


def mapped(file: IO[bytes], segments: Sequence[Segment]) -> list[memoryview]:
    memory = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    return [memory[start : start + size] for start, size in segments]


@dataclass(frozen=True)
class Address:
    """Address of shared memory, valid while its keeper (the process that made the memory) lives."""

    name: str
    pid: int
    descriptor: int
    segments: tuple[Segment, ...]

    @property
    def path(self) -> Path:
        """Valid on the keeper's machine for the same user."""
        return Path(f"/proc/{self.pid}/fd/{self.descriptor}")

    @property
    def size(self) -> int:
        return max((start + size for start, size in self.segments), default=0)

    @property
    def is_here(self) -> bool:
        """True on the keeper's machine. Elsewhere, the process ID may belong to another process."""
        try:
            return str(self.path.readlink()).startswith(f"/memfd:{self.name} ")
        except OSError:
            return False

    def mapped(self) -> list[memoryview]:
        """Map the segments. OSError: the keeper is on another machine, or has ended."""
        with self.path.open("rb") as file:
            return mapped(file, self.segments)


class SharedMemory:
    """Keeps the parts of a call for other processes. Memory that they map outlives this object."""

    def __init__(self, parts: Sequence[Bytes] = ()) -> None:
        self._name = f"daskpytorch-{uuid.uuid4().hex}"
        self._file = os.fdopen(os.memfd_create(self._name), "wb")
        self._segments = write_parts(self._file, parts)
        self.close = weakref.finalize(self, self._file.close)

    @property
    def address(self) -> Address:
        return Address(self._name, os.getpid(), self._file.fileno(), self._segments)


# ---- In pieces


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A rank's pieces arrive in order, one value after the other."""

    path: str | None
    """Path in the results' folder (empty if only the task's folder must exist), or None for a return value."""
    file: str
    """Name of the value's file in a folder of the driver."""
    start: int = 0
    """Place of the data in the file."""
    data: bytes = b""
    is_last: bool = True
    segments: tuple[Segment, ...] = ()
    """Places of the return value's parts in the file, given with the last piece."""


def cut(path: str | None, parts: Sequence[Bytes]) -> Iterator[Piece]:
    name, segments = uuid.uuid4().hex, _segments(parts)
    views = [
        (start + at, memoryview(part)[at : at + PIECE_SIZE])
        for (start, size), part in zip(segments, parts, strict=True)
        for at in range(0, max(size, 1), PIECE_SIZE)
    ]
    for index, (start, view) in enumerate(views):
        is_last = index == len(views) - 1
        last = segments if is_last else ()
        yield Piece(path=path, file=name, start=start, data=bytes(view), is_last=is_last, segments=last)
