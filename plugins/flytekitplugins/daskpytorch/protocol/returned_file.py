"""A large return value in a file that both its ends can open: written by a rank, mapped by the driver of its machine.

What is pickled goes into it as it comes, and the memory of arrays and tensors beside that as it lies, at the start of
a page. The driver removes the file's name at once, so that nothing is left of it however the two end.
"""

from __future__ import annotations

import io
import mmap
import pickle
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from flytekitplugins.daskpytorch.protocol.pickling import LARGE
from flytekitplugins.daskpytorch.protocol.result_frames import SMALL_SIZE, Piece, Reader

if TYPE_CHECKING:
    from collections.abc import Callable

    from _typeshed import ReadableBuffer


class FileWriter:
    """Stands in for `result_frames.Writer` where a rank reaches the driver's folder."""

    def __init__(self, folder: Path, send: Callable[[Piece], object]) -> None:
        self._path = folder / f"returned-{uuid.uuid4().hex}"
        self._send = send
        self._file: IO[bytes] | None = None
        self._pending = bytearray()
        """Of the pickle, what is not in the file yet; what is small never is."""
        self._pickled: list[tuple[int, int]] = []
        self._aside: list[tuple[int, int]] = []
        self._end = 0

    def write(self, data: ReadableBuffer) -> int:
        """Take some more of the pickle.

        Raises:
            OSError: The disk is full, say.
        """
        memory = memoryview(data).cast("B")
        if len(self._pending) + len(memory) > SMALL_SIZE:
            self._flush()
            self._pickled.append(self._add(memory))
        else:
            self._pending += memory
        return len(memory)

    def takes(self, buffer: pickle.PickleBuffer) -> bool:
        """Whether memory goes into the pickle, as pickle asks of each that could be left out."""
        with buffer.raw() as memory:
            if memory.nbytes < LARGE:
                return True
            self._flush()
            self._end = -(-self._end // mmap.PAGESIZE) * mmap.PAGESIZE
            self._aside.append(self._add(memory))
            return False

    def close(self) -> bytes | None:
        """That was all; what is small, or None where the driver is told of the file."""
        if self._file is None:
            return bytes(self._pending)
        self._flush()
        self._file.close()
        places = str(self._path), self._pickled, self._aside
        self._send(Piece("", None, b"", is_first=True, is_last=True, file=places))
        return None

    def abandon(self) -> None:
        """Leave nothing."""
        if self._file is not None:
            self._path.unlink(missing_ok=True)

    def _flush(self) -> None:
        if self._pending:
            pending, self._pending = self._pending, bytearray()
            self._pickled.append(self._add(memoryview(pending)))

    def _add(self, data: memoryview) -> tuple[int, int]:
        """Where that is."""
        if self._file is None:
            self._file = self._path.open("xb")
        start, self._end = self._end, self._end + len(data)
        self._file.seek(start)
        self._file.write(data)
        return start, len(data)


@dataclass(frozen=True)
class MappedReturn:
    """What a rank has returned, in memory that is the file's, until somebody writes there."""

    pickled: list[memoryview]
    aside: list[memoryview]

    @classmethod
    def of(cls, path: str, pickled: list[tuple[int, int]], aside: list[tuple[int, int]]) -> MappedReturn:
        """Of a file, which has no name from now on, and the places in it.

        Raises:
            OSError: It is not here.
        """
        with Path(path).open("rb") as file:
            Path(path).unlink()
            memory = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        return cls(*([memory[start : start + size] for start, size in places] for places in (pickled, aside)))

    def load(self) -> Any:
        """The value."""
        with io.BufferedReader(Reader(iter(self.pickled))) as file:
            return pickle.load(file, buffers=self.aside)  # noqa: S301 - from our own rank
