"""What is large in a call or a return value: in a file that both ends can open, each part mapped as it lies there.

A call's file is memory without a folder (`memfd_create`): the driver or an agent fills it, and the node's ranks map it.
It lives as long as anybody has it open or mapped; others on the machine open it by the process that keeps it. A return
value's file lies in the driver's folder: the rank writes it, and the driver removes its name as soon as it maps it. So
nothing is left of either, however the processes end. What somebody writes into mapped memory only they see.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import uuid
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

from flytekitplugins.daskpytorch.protocol.framing import Connection
from flytekitplugins.daskpytorch.protocol.pickling import LARGE
from flytekitplugins.daskpytorch.protocol.result_frames import SMALL_SIZE, Piece

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PIECE_SIZE = 1 << 20
"""Bytes to take from a connection at a time."""
Segment = tuple[int, int]
"""Where a part lies in the file: its start, at that of a page, and its size in bytes."""


class Segments:
    """A file's parts, which are added at its end."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self._end = 0

    def add(self, data: bytes | memoryview) -> Segment:
        """Copy some bytes to the end of the file, to a page of their own.

        Raises:
            OSError: The disk is full, say.
        """
        start = -(-self._end // mmap.PAGESIZE) * mmap.PAGESIZE
        self.file.seek(start)
        self.file.write(data)
        self.file.flush()
        self._end = start + len(data)
        return start, len(data)


def mapped(file: IO[bytes], segments: Sequence[Segment]) -> list[memoryview]:
    """Map these parts of a file. What is written there only this process sees, and takes memory for."""
    memory = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    return [memory[start : start + size] for start, size in segments]


# ---- Of a call


@dataclass(frozen=True)
class Address:
    """Where shared memory is, for as long as its keeper lives."""

    name: str
    """No other memory has it."""
    pid: int
    """The keeper's."""
    descriptor: int
    """There."""
    segments: tuple[Segment, ...]
    """What is in it, in order."""

    @property
    def path(self) -> Path:
        """The file, as other processes of the user's on the keeper's machine open it."""
        return Path(f"/proc/{self.pid}/fd/{self.descriptor}")

    @property
    def size(self) -> int:
        """Bytes of the whole memory."""
        return max((start + size for start, size in self.segments), default=0)

    @property
    def is_here(self) -> bool:
        """Whether it can be opened here; elsewhere a process of this number has other files, if there is one."""
        try:
            return str(self.path.readlink()).startswith(f"/memfd:{self.name} ")
        except OSError:
            return False

    def mapped(self) -> list[memoryview]:
        """Map what is in it.

        Raises:
            OSError: It is not here.
        """
        with self.path.open("rb") as file:
            return mapped(file, self.segments)


class SharedMemory:
    """The keeper's end. With this object the memory is gone, but for those who have mapped it."""

    def __init__(self) -> None:
        """Make an empty one.

        Raises:
            OSError: This process may open no more files.
        """
        self._file = os.fdopen(os.memfd_create(f"daskpytorch-{uuid.uuid4().hex}"), "wb")
        self._parts = Segments(self._file)
        self._segments: list[Segment] = []
        self.close = weakref.finalize(self, self._file.close)
        """Let go of it before this object goes."""

    @classmethod
    def received(cls, connection: Connection, original: Address) -> Self:
        """Another with what is in the original, whose keeper sends it.

        Raises:
            EOFError: The keeper went away.
            OSError: The connection broke, or there is no memory for it.
        """
        memory, left = cls(), original.size
        while left:
            if not (piece := connection.read(min(PIECE_SIZE, left))):
                raise EOFError(f"the call's large arguments ended with {left:,} of their bytes missing")
            memory._file.write(piece)
            left -= len(piece)
        memory._file.flush()
        memory._segments = list(original.segments)
        return memory

    def add(self, data: bytes | memoryview) -> None:
        """Copy some bytes to the end of it."""
        self._segments.append(self._parts.add(data))

    @property
    def address(self) -> Address:
        """Where all this is."""
        descriptor = self._file.fileno()
        link = Path(f"/proc/self/fd/{descriptor}").readlink()  # /memfd:NAME (deleted)
        name = str(link).removeprefix("/memfd:").removesuffix(" (deleted)")
        return Address(name, os.getpid(), descriptor, tuple(self._segments))


# ---- Of a return value


def send_by_file(
    dump: Callable[[IO[bytes], Callable[[pickle.PickleBuffer], bool]], object],
    folder: Path,
    send: Callable[[Piece], object],
) -> bytes | None:
    """Pickle a value into a file, and tell the driver of the file; return the pickle instead if it is small.

    Args:
        dump: Pickles the value into a file. For each buffer, it asks a function whether the buffer goes in there, too.
        folder: The driver's, which this process can write to.
        send: Tells the driver.

    Raises:
        OSError: The disk is full, say. No file is left.
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
            segments = [parts.add(memory) for memory in (pickled.getbuffer(), *aside)]
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    send(Piece("", None, b"", is_first=True, is_last=True, file=(str(path), segments)))
    return None


class MappedReturn:
    """What a rank has returned, in memory that is the file's, until somebody writes there."""

    def __init__(self, path: str, segments: list[Segment]) -> None:
        """Map a file, which has no name from now on.

        Raises:
            OSError: It is not here.
        """
        with Path(path).open("rb") as file:
            Path(path).unlink()
            self.pickled, *self.aside = mapped(file, segments)

    def load(self) -> Any:
        """Return the value."""
        return pickle.loads(self.pickled, buffers=self.aside)  # noqa: S301 - from our own rank
