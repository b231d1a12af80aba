"""Large calls, return values and submitted files, on their way between the driver and the ranks.

A pickled value has parts: the pickle, and the memory of each large array and tensor (`pickler.put_apart`).

A large call is anonymous memory (`memfd_create`) of the driver or an agent, the keeper. The node's ranks map it through
`/proc/PID/fd`, so that their writes stay private.

A rank on the driver's machine writes its return value to the driver's folder. The driver maps the file and deletes its
name at once, so that no file remains, however the processes end. Other values, and submitted files, travel in pieces.
"""

from __future__ import annotations

import contextlib
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
    """Each part begins at the start of a memory page. OSError: for example, the disk is full."""
    segments: list[Segment] = []
    for part in parts:
        start = -(-file.tell() // mmap.PAGESIZE) * mmap.PAGESIZE
        file.seek(start)
        file.write(part)
        segments.append((start, len(part)))
    file.flush()
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


@dataclass(frozen=True)
class Piece:
    """A rank's pieces arrive in order, one value after the other."""

    path: str | None
    """Path in the results' folder (empty if only the task's folder must exist), or None for a return value."""
    data: bytes
    is_first: bool
    is_last: bool
    file: str | None = None
    """File with the whole return value, unless the pieces' data has it."""
    segments: tuple[Segment, ...] = ()
    """Places of the return value's parts in `file`, given with the last piece. Without a file only their sizes count,
    and each piece belongs to one part."""


def cut(path: str, data: bytes) -> Iterator[Piece]:
    return _cut(path, [data])


def pieces_of_returned(parts: Sequence[Bytes], folder: Path | None) -> Iterator[Piece]:
    written = None
    if folder is not None:
        with contextlib.suppress(OSError):  # for example, the disk is full
            written = _written(parts, folder)
    return _cut(None, parts) if written is None else iter([written])


def _written(parts: Sequence[Bytes], folder: Path) -> Piece:
    path = folder / f"returned-{uuid.uuid4().hex}"
    try:
        with path.open("xb") as file:
            segments = write_parts(file, parts)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return Piece(None, b"", is_first=True, is_last=True, file=str(path), segments=segments)


def _cut(path: str | None, parts: Sequence[Bytes]) -> Iterator[Piece]:
    views = [memoryview(part)[at : at + PIECE_SIZE] for part in parts for at in range(0, len(part), PIECE_SIZE)]
    views = views or [memoryview(b"")]
    segments = tuple((0, len(part)) for part in parts) if path is None else ()
    for index, view in enumerate(views):
        is_last = index == len(views) - 1
        yield Piece(path, bytes(view), index == 0, is_last, segments=segments if is_last else ())
