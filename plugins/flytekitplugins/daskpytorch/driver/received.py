"""What the ranks of a gang have submitted and nobody has processed yet. Runs in the driver."""

import io
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import IO

from flytekitplugins.daskpytorch.driver.result_buffer import Kept, ResultBuffer
from flytekitplugins.daskpytorch.protocol.result_frames import Piece, Reader

__all__ = ["Part", "ReceivedResults", "Submission"]


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
