"""Large arguments, results and return values, on their way between the driver and the ranks.

Results, and return values from other machines, travel in pieces: from a rank through its agent to the driver. Agents
only relay the pieces.

Large parts of a call, and of a return value on the driver's machine, are in files that the receiver maps into its
memory. Writes to mapped memory stay private to their process.

A call's file is anonymous memory (`memfd_create`). The driver or an agent fills the file, and the node's ranks open it
through the keeper's `/proc/PID/fd` and map it. The memory lives while a process has the file open or mapped.

A return value's file is in the driver's folder. The rank writes the file. The driver maps the file and deletes its name
at once. So no file remains, however the processes end.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

from flytekitplugins.daskpytorch.protocol.framing import Connection
from flytekitplugins.daskpytorch.protocol.pickling import LARGE

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

PIECE_SIZE = 1 << 20
"""Maximum number of bytes of a piece of a result or return value. An agent relays a piece in milliseconds, which delays
other ranks and heartbeats only briefly."""
SMALL_SIZE = 1 << 16
"""Maximum number of bytes of a pickled return value that a rank sends whole, within its report that the function
returned."""
Segment = tuple[int, int]
"""Start and size of a part in a file, in bytes. Starts are multiples of the page size."""


# ---- In pieces


@dataclass(frozen=True)
class Piece:
    """A part of a rank's result or return value. A rank's pieces arrive in order, one result after the other."""

    path: str | None
    """Path of the result's file, relative to the folder of the results. Empty: the task's folder must exist. None for a
    return value."""
    data: bytes
    is_first: bool
    is_last: bool
    file: tuple[str, list[tuple[int, int]]] | None = None
    """Path of a file with the whole return value, and start and size of the file's parts in bytes. None if `data` has
    the bytes."""


def cut(path: str, data: bytes) -> Iterator[Piece]:
    """Yield the pieces of a file that a rank submits. An empty file has one empty piece."""
    for start in range(0, max(1, len(data)), PIECE_SIZE):
        end = start + PIECE_SIZE
        yield Piece(path, data[start:end], start == 0, end >= len(data))


class Writer:
    """File object that sends a pickled return value in pieces while pickle writes to it."""

    def __init__(self, send: Callable[[Piece], object]) -> None:
        self._send = send
        self._buffer = bytearray()
        self._is_first = True

    def write(self, data: ReadableBuffer) -> int:
        """Buffer some bytes, and send each full piece."""
        rest = memoryview(data).cast("B")
        size = len(rest)
        while rest:
            room = PIECE_SIZE - len(self._buffer)
            self._buffer += rest[:room]
            rest = rest[room:]
            if len(self._buffer) == PIECE_SIZE:
                self._send_piece(is_last=False)
        return size

    def close(self) -> bytes | None:
        """Send the last piece, and return None. A small value without earlier pieces is returned instead."""
        if self._is_first and len(self._buffer) <= SMALL_SIZE:
            return bytes(self._buffer)
        self._send_piece(is_last=True)
        return None

    def _send_piece(self, *, is_last: bool) -> None:
        self._send(Piece(None, bytes(self._buffer), self._is_first, is_last))
        self._buffer.clear()
        self._is_first = False


class Reader(io.RawIOBase):
    """File object that reads a result from its pieces, one piece in memory at a time."""

    def __init__(self, pieces: Iterator[bytes] | Iterator[memoryview]) -> None:
        super().__init__()
        self._pieces = pieces
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        """Return True, as `io.BufferedReader` demands."""
        return True

    def readinto(self, into: WriteableBuffer) -> int:
        """Fill a buffer with the next bytes, and return their number. Return 0 at the end."""
        if not self._rest:
            self._rest = memoryview(next(self._pieces, b""))
        target = memoryview(into)
        size = min(len(target), len(self._rest))
        target[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


# ---- In files


class Segments:
    """Appends parts to a file, each at the start of a memory page."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.added: list[Segment] = []
        """Parts of the file so far, in order."""

    def add(self, data: bytes | memoryview) -> None:
        """Copy some bytes to the end of the file.

        Raises:
            OSError: The write failed, for example on a full disk.
        """
        start, size = self.added[-1] if self.added else (0, 0)
        start = -(-(start + size) // mmap.PAGESIZE) * mmap.PAGESIZE
        self.file.seek(start)
        self.file.write(data)
        self.file.flush()
        self.added.append((start, len(data)))


def mapped(file: IO[bytes], segments: Sequence[Segment]) -> list[memoryview]:
    """Map segments of a file into memory, one view each. Writes stay private to this process."""
    memory = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    return [memory[start : start + size] for start, size in segments]


# ---- Of a call


@dataclass(frozen=True)
class Address:
    """Address of shared memory, valid while its keeper (the process that made the memory) lives."""

    name: str
    """Unique name of the shared memory."""
    pid: int
    """Process ID of the keeper."""
    descriptor: int
    """Number of the keeper's file descriptor of the memory."""
    segments: tuple[Segment, ...]
    """Start and size of each argument's memory, in bytes, in order."""

    @property
    def path(self) -> Path:
        """Path of the memory's file, valid on the keeper's machine for the same user."""
        return Path(f"/proc/{self.pid}/fd/{self.descriptor}")

    @property
    def size(self) -> int:
        """Size of the whole memory in bytes."""
        return max((start + size for start, size in self.segments), default=0)

    @property
    def is_here(self) -> bool:
        """True if this machine has the memory. Elsewhere the process ID is unused or belongs to another process."""
        try:
            return str(self.path.readlink()).startswith(f"/memfd:{self.name} ")
        except OSError:
            return False

    def mapped(self) -> list[memoryview]:
        """Map the segments into this process's memory.

        Raises:
            OSError: This machine is not the keeper's, or the keeper has ended.
        """
        with self.path.open("rb") as file:
            return mapped(file, self.segments)


class SharedMemory(Segments):
    """Shared memory that this process has made and keeps for others. `add` copies some bytes to its end.

    Deletion of this object frees the memory, unless other processes map the memory.
    """

    def __init__(self) -> None:
        """Make empty shared memory.

        Raises:
            OSError: This process may open no more files.
        """
        super().__init__(os.fdopen(os.memfd_create(f"daskpytorch-{uuid.uuid4().hex}"), "wb"))
        self.close = weakref.finalize(self, self.file.close)
        """Function that closes the memory's file before the deletion of this object."""

    @classmethod
    def received(cls, connection: Connection, original: Address) -> Self:
        """Receive a copy of shared memory whose keeper sends the content.

        Args:
            connection: The connection to the keeper.
            original: The address of the keeper's memory.

        Raises:
            EOFError: The keeper closed the connection too early.
            OSError: The connection broke, or this machine lacks memory.
        """
        memory = cls()
        for piece in connection.pieces(original.size, "the call's large arguments"):
            memory.file.write(piece)
        memory.file.flush()
        memory.added = list(original.segments)
        return memory

    @property
    def address(self) -> Address:
        """Address of the memory, with the segments so far."""
        descriptor = self.file.fileno()
        link = Path(f"/proc/self/fd/{descriptor}").readlink()  # /memfd:NAME (deleted)
        name = str(link).removeprefix("/memfd:").removesuffix(" (deleted)")
        return Address(name, os.getpid(), descriptor, tuple(self.added))


# ---- Of a return value


def send_by_file(
    dump: Callable[[IO[bytes], Callable[[pickle.PickleBuffer], bool]], object],
    folder: Path,
    send: Callable[[Piece], object],
) -> bytes | None:
    """Pickle a value into a file in the driver's folder, and send the driver the file's name.

    Args:
        dump: Pickles the value into the file given first. Calls the function given second for each buffer: True means
            that the buffer goes into the pickle, too.
        folder: The driver's folder, which this process can write to.
        send: Sends a piece to the driver.

    Returns:
        The pickle itself if it is small, without a file. None otherwise.

    Raises:
        OSError: The write failed, for example on a full disk. No file remains.
    """
    pickled, aside = io.BytesIO(), []

    def takes(buffer: pickle.PickleBuffer) -> bool:
        if (memory := buffer.raw()).nbytes < LARGE:
            return True
        aside.append(memory)
        return False

    dump(pickled, takes)
    if not aside and pickled.tell() <= SMALL_SIZE:
        return pickled.getvalue()
    path = folder / f"returned-{uuid.uuid4().hex}"
    try:
        with path.open("xb") as file:
            parts = Segments(file)
            for memory in (pickled.getbuffer(), *aside):
                parts.add(memory)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    send(Piece(None, b"", is_first=True, is_last=True, file=(str(path), parts.added)))
    return None


class MappedReturn:
    """A rank's pickled return value, mapped from a file in the driver's folder."""

    def __init__(self, path: str, segments: list[Segment]) -> None:
        """Map the file into memory, and remove the file from the folder.

        Raises:
            OSError: The file does not exist or cannot be mapped.
        """
        with Path(path).open("rb") as file:
            Path(path).unlink()
            self.pickled, *self.aside = mapped(file, segments)

    def load(self) -> Any:
        """Unpickle and return the rank's return value."""
        return pickle.loads(self.pickled, buffers=self.aside)  # noqa: S301 - from the gang's own rank
