"""Submitted files and return values that a gang's ranks have sent, each in a file. Runs in the driver."""

import contextlib
import functools
import io
import os
import pickle
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from flytekitplugins.daskpytorch.process.folders import scratch_folder
from flytekitplugins.daskpytorch.protocol.messages import Piece


@dataclass(frozen=True, kw_only=True)
class ReceivedPiece:
    rank: int
    piece: Piece
    """Without its data."""
    error: OSError | None = None


class ReceivedResults:
    """Submitted files and return values of one gang's ranks, over all attempts, in order of arrival."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._returned: dict[int, Path] = {}
        self._lock = threading.Lock()
        """One thread writes files at a time."""
        self._waiting: deque[tuple[int, str, Path]] = deque()
        self.folder_is_wanted = False
        """True if a rank has requested the folder of the task's results, by a file without a path."""
        self.close = weakref.finalize(self, _close, self._stack, os.getpid())

    @functools.cached_property
    def _folder(self) -> Path:
        return self._stack.enter_context(scratch_folder("daskpytorch-results-"))

    def keep(self, rank: int, piece: Piece) -> ReceivedPiece:
        """Write a piece, and return the part for `add`. In the listener's thread: a slow disk makes ranks wait."""
        kept = ReceivedPiece(rank=rank, piece=replace(piece, data=b""))
        try:
            with (self._folder / piece.file).open("ab") as file:
                file.write(piece.data)
        except OSError as error:
            return replace(kept, error=error)
        return kept

    def add(self, part: ReceivedPiece) -> None:
        """In the gang's thread, which drops parts of ranks that have left the attempt.

        OSError: a piece could not be written, since the driver's disk is full, for example.
        """
        piece = part.piece
        if part.error is not None:
            raise part.error
        if piece.is_last and piece.path is None:
            self._returned[part.rank] = self._folder / piece.file
        elif piece.is_last and piece.path:
            self._waiting.append((part.rank, piece.path, self._folder / piece.file))
        elif piece.is_last:
            self.folder_is_wanted = True

    @property
    def is_empty(self) -> bool:
        return not self._waiting

    def write_files(self, write: Callable[[int, str, Path], object]) -> None:
        """Call `write` with rank, path and content of each submitted file, the oldest first.

        A file whose `write` fails is kept for the next call.
        """
        with self._lock:
            while self._waiting:
                rank, path, file = self._waiting[0]
                write(rank, path, file)
                file.unlink(missing_ok=True)
                self._waiting.popleft()

    def take_returned(self, rank: int, small: bytes | None) -> Callable[[], Any]:
        """Remove a rank's return value. The returned function unpickles it, in any thread.

        `small` is None if pieces carried the value.
        """
        return partial(self._load, rank, self._returned.pop(rank) if small is None else small)

    def drop_returned(self) -> None:
        self._returned.clear()

    def _load(self, rank: int, data: bytes | Path) -> Any:  # not a static method: the folder lives as long as `self`
        try:
            with io.BytesIO(data) if isinstance(data, bytes) else data.open("rb") as file:
                value = pickle.load(file)  # noqa: S301 - from our own rank
        except BaseException as error:  # any error of a user's class or extension
            kept = _kept_for_user(data)
            error.add_note(f"raised while the return value of rank {rank} was unpickled in the driver{kept}")
            raise
        if isinstance(data, Path):
            data.unlink()
        return value


def _close(stack: contextlib.ExitStack, pid: int) -> None:
    if os.getpid() == pid:  # not in a fork
        stack.close()


def _kept_for_user(data: bytes | Path) -> str:
    try:
        with tempfile.NamedTemporaryFile(prefix="daskpytorch-returned-", suffix=".pickle", delete=False) as file:
            file.write(data if isinstance(data, bytes) else data.read_bytes())
    except OSError as error:
        return f". The value is lost, as it could not be written to a file: {error}"
    return f". The pickle is kept in {file.name}. Read the file with pickle.load"
