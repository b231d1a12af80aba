"""What the ranks of a gang have submitted and nobody has processed yet. Runs in the driver."""

import io
import os
import pickle
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import IO, Any

from flytekitplugins.daskpytorch.protocol.result_frames import Piece, Reader
from flytekitplugins.daskpytorch.protocol.segments import MappedReturn

MAX_IN_MEMORY = 1 << 20
"""Bytes; also why a thousand small gangs do not hold a thousand files open."""


@dataclass(frozen=True)
class Kept:
    """Where something is."""

    size: int
    data: bytes = b""
    """Itself, where it is in memory."""
    file: IO[bytes] | None = None
    """Else the file that holds it."""
    offset: int = 0
    """Where it begins in that file, in bytes."""
    mapped: MappedReturn | None = None
    """A return value that is in neither: the rank's own file."""


@dataclass(frozen=True)
class Part:
    """A piece of a result or return value that has arrived, and is kept."""

    rank: int
    piece: Piece
    """Without its data."""
    kept: Kept


@dataclass(frozen=True)
class Submission:
    """A result that is whole."""

    rank: int
    """Who submitted it."""
    key: str
    """Of the handler that did."""
    path: str
    parts: list[Kept]


class ReceivedResults:
    """One gang's results, for all of its attempts, in the order in which they came."""

    def __init__(self) -> None:
        self._buffer = ResultBuffer()
        self._unfinished: dict[int, list[Kept]] = {}
        self._returned: dict[int, list[Kept]] = {}
        self._lock = threading.Lock()
        self._waiting: deque[Submission] = deque()
        self.folder_is_wanted = False
        """A rank has asked for the folder that its task's results go to."""

    def keep(self, rank: int, piece: Piece) -> Part:
        """Take a piece in, on the thread that listens to the agents: when the disk is slow, their ranks wait."""
        if piece.file is not None:
            return Part(rank, replace(piece, file=None), Kept(0, mapped=MappedReturn(*piece.file)))
        return Part(rank, replace(piece, data=b""), self._buffer.put(piece.data))

    def add(self, part: Part) -> None:
        """Let a piece count; on the supervisor's thread, which knows whether its rank still has a say."""
        if part.piece.is_first:  # what came before it was cut short by its rank's end
            self._buffer.drop(self._unfinished.pop(part.rank, ()))
        parts = self._unfinished.setdefault(part.rank, [])
        parts.append(part.kept)
        if part.piece.is_last:
            del self._unfinished[part.rank]
            if part.piece.path is None:
                self._buffer.drop(self._returned.pop(part.rank, ()))  # of an older attempt
                self._returned[part.rank] = parts
                return
            with self._lock:
                self._waiting.append(Submission(part.rank, part.piece.key, part.piece.path, parts))

    @property
    def is_empty(self) -> bool:
        """Nothing whole waits."""
        return not self._waiting

    def claim(self, is_wanted: Callable[[str], bool]) -> deque[Submission]:
        """Take out the results whose keys are wanted; each must be dropped, or restored."""
        with self._lock:
            waiting, self._waiting = self._waiting, deque()
            claimed: deque[Submission] = deque()
            for submission in waiting:
                (claimed if is_wanted(submission.key) else self._waiting).append(submission)
        return claimed

    def restore(self, claimed: deque[Submission]) -> None:
        """Put results back, before those that came since."""
        with self._lock:
            self._waiting.extendleft(reversed(claimed))

    def read(self, submission: Submission) -> Iterator[bytes]:
        """A result's bytes, piece by piece."""
        return map(self._buffer.get, submission.parts)

    def drop(self, submission: Submission) -> None:
        """It has been processed."""
        self._buffer.drop(submission.parts)

    def load_returned(self, rank: int, small: bytes | None) -> Any:
        """What a rank has returned, once: what was small, or else what has come of it before."""
        if small is None and (mapped := self._returned[rank][0].mapped) is not None:
            del self._returned[rank]
            return mapped.load()
        with self.open_returned(rank, small) as file:
            return pickle.load(file)  # noqa: S301 - from our own rank, by its agent's connection

    def open_returned(self, rank: int, small: bytes | None) -> IO[bytes]:
        """What a rank has returned, pickled, to be read once: what was small, or else the pieces that are here."""
        if small is not None:
            return io.BytesIO(small)
        return io.BufferedReader(Reader(self._take(self._returned.pop(rank))))

    def drop_returned(self) -> None:
        """Nobody will read the rest."""
        while self._returned:
            self._buffer.drop(self._returned.popitem()[1])

    def _take(self, parts: list[Kept]) -> Iterator[bytes]:
        for kept in parts:
            data = self._buffer.get(kept)
            self._buffer.drop([kept])  # at once: nobody asks for more after the last
            yield data


class ResultBuffer:
    """Keeps bytes for a while: a few in memory, the rest in a temporary file without a name.

    Any thread may put, get and drop; a slow disk holds up only the one that puts. The file goes with the last reference
    to it, however the driver ends. Not `tempfile.SpooledTemporaryFile`, which is for one thread and loses all where it
    finds the disk full.
    """

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
                if kept.mapped is not None:
                    continue
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
