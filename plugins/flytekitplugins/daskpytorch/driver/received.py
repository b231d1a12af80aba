"""Buffer of the results and return values that a gang's ranks have sent. Runs in the driver."""

import contextlib
import os
import pickle
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from flytekitplugins.daskpytorch.protocol.payload import Piece, Segment, mapped

Stored = bytes | Segment | list[memoryview]
"""Data of a piece: its place in the buffer's file, its bytes if the disk is full, or a return value's mapped parts."""


@dataclass(frozen=True)
class ReceivedPiece:
    rank: int
    piece: Piece
    """Without its data."""
    stored: Stored


class ReceivedResults:
    """Submitted files and return values of one gang's ranks, over all attempts, in order of arrival."""

    def __init__(self) -> None:
        self._buffer = ResultBuffer()
        self._unfinished: dict[int, list[Stored]] = {}
        self._returned: dict[int, tuple[list[Stored], Sequence[Segment]]] = {}
        self._lock = threading.Lock()
        """One thread writes files at a time."""
        self._waiting: deque[tuple[int, str, list[Stored]]] = deque()
        self.notify: Callable[[], object] = lambda: None
        """Called in the gang's thread after each complete result."""
        self.folder_is_wanted = False
        """True if a rank has requested the folder of the task's results, by a file without a path."""

    def keep(self, rank: int, piece: Piece) -> ReceivedPiece:
        """Buffer a piece, and return the part for `add`. In the listener's thread: a slow disk makes ranks wait."""
        if piece.file is not None:
            with Path(piece.file).open("rb") as file:
                Path(piece.file).unlink()
                return ReceivedPiece(rank, piece, mapped(file, piece.segments))
        return ReceivedPiece(rank, replace(piece, data=b""), self._buffer.put(piece.data))

    def add(self, part: ReceivedPiece) -> None:
        """In the gang's thread, which drops parts of ranks that have left the attempt."""
        if part.piece.is_first:  # drops an incomplete result: the rank's process ended
            self._buffer.drop(self._unfinished.pop(part.rank, ()))
        parts = self._unfinished.setdefault(part.rank, [])
        parts.append(part.stored)
        if part.piece.is_last:
            del self._unfinished[part.rank]
            if part.piece.path is None:
                self._drop_returned(part.rank)  # an older attempt's return value
                self._returned[part.rank] = parts, part.piece.segments
                return
            if part.piece.path:
                self._waiting.append((part.rank, part.piece.path, parts))
                self.notify()
            else:
                self.folder_is_wanted = True

    @property
    def is_empty(self) -> bool:
        return not self._waiting

    def write_files(self, write: Callable[[int, str, Iterator[bytes]], object]) -> None:
        """Call `write` with rank, path and content of each submitted file, the oldest first.

        A file whose `write` fails is kept for the next call.
        """
        with self._lock:
            while self._waiting:
                rank, path, pieces = self._waiting[0]
                write(rank, path, map(self._buffer.get, pieces))
                self._buffer.drop(pieces)
                self._waiting.popleft()

    def load_returned(self, rank: int, small: bytes | None) -> Any:
        """Return a rank's return value, once. `small` is None if pieces or a file carried it."""
        return self.take_returned(rank, small)()

    def take_returned(self, rank: int, small: bytes | None) -> Callable[[], Any]:
        """Remove a rank's return value. The returned function unpickles it, once and in any thread."""
        pieces, segments = self._returned.pop(rank) if small is None else ([], ())
        return partial(self._load, rank, small, pieces, segments)

    def drop_returned(self) -> None:
        for rank in list(self._returned):
            self._drop_returned(rank)

    def _drop_returned(self, rank: int) -> None:
        pieces, _ = self._returned.pop(rank, ([], ()))
        self._buffer.drop(pieces)

    def _load(self, rank: int, small: bytes | None, pieces: list[Stored], segments: Sequence[Segment]) -> Any:
        try:
            parts = [small] if small is not None else list(self._parts(pieces, segments))
        finally:
            self._buffer.drop(pieces)
        try:
            return pickle.loads(parts[0], buffers=parts[1:])  # noqa: S301 - from our own rank
        except BaseException as error:  # any error of a user's class or extension
            kept = _kept_for_user(parts)
            error.add_note(f"raised while the return value of rank {rank} was unpickled in the driver{kept}")
            raise

    def _parts(self, pieces: list[Stored], segments: Sequence[Segment]) -> Iterator[memoryview | bytearray]:
        if isinstance(pieces[0], list):
            yield from pieces[0]
            return
        data = map(self._buffer.get, pieces)
        for _, size in segments:
            part = bytearray()
            while len(part) < size:
                part += next(data)
            yield part


def _kept_for_user(parts: Sequence[Any]) -> str:
    try:
        with tempfile.NamedTemporaryFile(prefix="daskpytorch-returned-", suffix=".pickle", delete=False) as file:
            pickle.dump([*map(pickle.PickleBuffer, parts)], file, protocol=5)
    except OSError as error:
        return f". The value is lost, as it could not be written to a file: {error}"
    how = "data, *buffers = pickle.load(file); value = pickle.loads(data, buffers=buffers)"
    return f". The pickle is kept in {file.name}. Read the file with: {how}"


class ResultBuffer:
    """Stores pieces in an unnamed temporary file. A slow disk blocks only the thread that puts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file: IO[bytes] | None = None
        self._end = 0
        self._num_in_file = 0

    def put(self, data: bytes) -> Stored:
        """Keep bytes in the file, or on a disk error in memory."""
        with contextlib.suppress(OSError):
            return self._put_in_file(data)
        return data

    def get(self, stored: Stored) -> bytes:
        if isinstance(stored, bytes):
            return stored
        if isinstance(stored, list) or self._file is None:
            raise ValueError("a piece of a result is read that is not in the buffer, or was dropped before")
        start, size = stored
        return os.pread(self._file.fileno(), size, start)

    def drop(self, several: Iterable[Stored]) -> None:
        """An empty file is closed, which removes it."""
        with self._lock:
            self._num_in_file -= sum(isinstance(stored, tuple) for stored in several)
            if self._num_in_file == 0 and self._file is not None:
                self._file.close()
                self._file, self._end = None, 0

    def _put_in_file(self, data: bytes) -> Segment:
        with self._lock:  # not during the write, so that a slow disk blocks no other thread
            if self._file is None:
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
            file, start = self._file.fileno(), self._end
            self._end += len(data)
            self._num_in_file += 1
        segment, num_written = (start, len(data)), 0
        try:
            while num_written < len(data):
                num_written += os.pwrite(file, memoryview(data)[num_written:], start + num_written)
        except OSError:
            self.drop([segment])
            raise
        return segment
