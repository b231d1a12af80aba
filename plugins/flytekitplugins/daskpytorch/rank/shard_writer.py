"""Writes a rank's shards straight to storage, in the format of `torch.distributed.checkpoint`. Runs in a rank.

copied pieces --several parts at a time--> streams that compute digests --> storage: S3 through obstore, else fsspec
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, TYPE_CHECKING, Any

import xxhash

from flytekitplugins.daskpytorch.protocol.checkpoints import StoredItem, StoredPart
from flytekitplugins.daskpytorch.rank.quick_s3 import quick_files

if TYPE_CHECKING:
    from flytekitplugins.daskpytorch.rank.shard_plan import Piece


NUM_WRITERS = 2
"""Number of objects that a rank writes to storage at the same time.

With four, saves of two ranks on the host of their S3 server took 1.5 times as long.
"""
SMALL_PART, LARGE_PART = 16 << 20, 256 << 20
"""Minimum sizes, in bytes, of the objects into which a rank divides its shard: 16 MiB for two, 256 MiB for more."""
CHUNK = 8 << 20
"""Maximum number of bytes per `write` call on a file in storage. The file keeps them in memory until they are sent."""
RETRY_AFTER = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds before each retry of a failed write of an object to storage."""


class ShardWriter:
    """Writes this rank's part of one sharded checkpoint to storage."""

    def __init__(self, files: Any, folder: str, *, rank: int, step: int, moved: Callable[[], None]) -> None:
        self._files = files
        """The fsspec file system of the checkpoint's folder."""
        self._folder = folder
        self._rank = rank
        self._step = step
        self._moved = moved
        self._lock = threading.Lock()
        self._has_complained = False

    def write(self, pieces: Sequence[Piece]) -> tuple[list[StoredPart], list[StoredItem]]:
        """Write copies of tensors and other values to storage, divided among one or more objects.

        Returns:
            The written objects, and each copy's position in them.

        Raises:
            Exception: The storage's error after the last retry.
        """
        shares = {f"__{self._rank}_{number}.distcp": share for number, share in enumerate(_divided(pieces))}
        with ThreadPoolExecutor(NUM_WRITERS, "daskpytorch-shards") as pool:
            written = [pool.submit(self._write_with_retries, name, share) for name, share in shares.items()]
        parts = [future.result() for future in written]
        return [part for part, _ in parts], [item for _, items in parts for item in items]

    def _write_with_retries(self, name: str, share: Sequence[Piece]) -> tuple[StoredPart, list[StoredItem]]:
        with contextlib.suppress(Exception):  # s3fs may succeed, or give the error
            if (quick := quick_files(self._files, self._folder)) is not None:
                return self._write(name, share, quick)
        for wait in RETRY_AFTER:
            try:
                return self._write(name, share, self._files)
            except Exception as error:  # any error of a store's client
                self._complain(error)
                time.sleep(wait)
        return self._write(name, share, self._files)

    def _write(self, name: str, share: Sequence[Piece], files: Any) -> tuple[StoredPart, list[StoredItem]]:
        path = f"{self._folder}/{name}"
        try:
            with self._open(files, path) as file:
                stream = _Stream(file)
                items = [self._written(piece, stream, name) for piece in share]
        except BaseException:
            with contextlib.suppress(Exception):  # an unfinished part would fill the disk
                self._files.rm_file(path)
            raise
        return StoredPart(name=name, size=stream.position), items

    def _written(self, piece: Piece, stream: _Stream, part: str) -> StoredItem:
        start, stream.digest = stream.position, xxhash.xxh3_128()
        piece.write(stream)  # type: ignore[arg-type]
        self._moved()
        index = piece.item.index
        return StoredItem(
            key=index.fqn,
            offset=None if index.offset is None else tuple(index.offset),
            index=index.index,
            part=part,
            start=start,
            length=stream.position - start,
            digest=stream.digest.hexdigest(),
        )

    def _open(self, files: Any, path: str) -> Any:
        try:
            return files.open(path, "wb")
        except FileNotFoundError:  # a storage with folders
            files.makedirs(self._folder, exist_ok=True)
            return files.open(path, "wb")

    def _complain(self, error: Exception) -> None:
        with self._lock:
            if not self._has_complained:
                print(
                    f"the shards of step {self._step} could not be written to {self._folder} ({type(error).__name__}: "
                    f"{error}); trying again, while the training goes on",
                    file=sys.stderr,
                )
            self._has_complained = True


class _Stream:
    """File object for `torch.save` that counts the written bytes and computes their digest."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.position = 0
        self.digest = xxhash.xxh3_128()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), CHUNK):
            chunk = view[start : start + CHUNK]
            self.digest.update(chunk)
            self._file.write(bytes(chunk))  # obstore reads the copy later, when torch may have reused `data`
        self.position += len(view)
        return len(view)

    def flush(self) -> None:
        """Do nothing, as the file in storage is flushed when it is closed."""


def _divided(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Divide the copies that a rank writes among objects of about equal size. The largest copies come first."""
    size = sum(piece.size for piece in pieces)
    num_parts = max(1, min(NUM_WRITERS, size // SMALL_PART), size // LARGE_PART)
    largest_first = sorted(pieces, key=lambda piece: piece.size, reverse=True)
    return [share for number in range(num_parts) if (share := largest_first[number::num_parts])]
