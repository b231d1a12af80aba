"""A cache of objects from S3 on a local disk, up to a size. All processes of one machine use it together.

The name of a file is a hash of the object's bucket, key and ETag, so that a file is never out of date.
"""

import hashlib
import logging
import os
import re
import time
from contextlib import suppress
from pathlib import Path

from flytekitplugins.daskpytorch.data.bucket import Listed
from flytekitplugins.daskpytorch.data.image_index import write_whole
from flytekitplugins.daskpytorch.process.folders import make_private

logger = logging.getLogger(__name__)

OWN_FOLDER = "daskpytorch-images"
OURS = re.compile(r"[0-9a-f]{64}|\.[0-9a-f]{64}-\w+")
"""Pattern of the names of the cache's files, and of unfinished files of a process that has ended."""
MAX_WRITING = 3600.0
"""Seconds after which an unfinished file belongs to a process that has ended. Younger ones may be in use."""
LOW_WATER = 0.9
"""Share of the cache's size that remains after the files that were used longest ago are removed."""
SHARE_BETWEEN_LOOKS = 0.03
"""Share of the cache's size that a process writes before it adds up all files again."""
DIGEST_SIZE = 16
"""Bytes of the checksum at the end of each file. A full disk or a crash may leave a file cut short."""


class ImageCache:
    """A folder of whole files with a bounded size, which each writing process may exceed by a few percent.

    No library was found that does this without a database that all processes lock, or without loading pickles.
    """

    def __init__(self, folder: str | os.PathLike[str], num_bytes: int) -> None:
        """Keep up to this many bytes in a folder below `folder`. Other files in `folder` are left alone.

        Raises:
            PermissionError: Another user owns the cache's folder, or can write to it.
        """
        self._folder = Path(folder) / OWN_FOLDER
        self._num_bytes = num_bytes
        self._num_written = num_bytes  # look at the first write
        make_private(self._folder)

    def get(self, bucket: str, listed: Listed) -> bytes | None:
        """Return the object's content, or None if the cache does not have it whole."""
        path = self._path(bucket, listed)
        try:
            content = path.read_bytes()
            os.utime(path)  # the time of the last use, which mounted file systems often do not record
        except OSError:
            return None
        body = content[:-DIGEST_SIZE]
        return body if len(body) == listed.size and _digest(body) == content[-DIGEST_SIZE:] else None

    def put(self, bucket: str, listed: Listed, body: bytes) -> None:
        """Write an object to the cache. A full disk costs one log line."""
        path = self._path(bucket, listed)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            write_whole(path, body + _digest(body))
        except OSError as error:
            logger.warning(
                "the cache of pictures in %s cannot be written: %s. The picture is used, and read from S3 again next "
                "time",
                self._folder,
                error,
            )
            return
        self._num_written += len(body) + DIGEST_SIZE
        if self._num_written >= SHARE_BETWEEN_LOOKS * self._num_bytes:
            self._num_written = 0
            self._make_room()

    def _path(self, bucket: str, listed: Listed) -> Path:
        name = hashlib.sha256(f"{bucket}/{listed.key}\0{listed.etag}".encode()).hexdigest()
        return self._folder / name[:2] / name

    def _make_room(self) -> None:
        """Remove the files that were used longest ago, if the cache is too large. Other processes may do the same."""
        found: list[tuple[float, int, str]] = []
        for shelf in os.scandir(self._folder):
            if shelf.is_dir():
                for file in os.scandir(shelf):
                    with suppress(FileNotFoundError):
                        if not OURS.fullmatch(file.name):
                            continue
                        status = file.stat()
                        if file.name.startswith(".") and time.time() - status.st_mtime < MAX_WRITING:
                            continue
                        found.append((status.st_mtime, status.st_size, file.path))
        excess = sum(size for _, size, _ in found) - self._num_bytes
        if excess <= 0:
            return
        excess += int((1 - LOW_WATER) * self._num_bytes)
        for _, size, path in sorted(found):
            if excess <= 0:
                break
            with suppress(FileNotFoundError):
                os.unlink(path)  # noqa: PTH108
            excess -= size


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=DIGEST_SIZE).digest()
