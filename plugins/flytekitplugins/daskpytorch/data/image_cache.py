"""Keeps what was read from S3 on a local disk, up to a size. Used by the processes of one machine at once.

A file is an object's content, under a name made from its bucket, key and ETag, so that it is never out of date.
"""

import hashlib
import logging
import os
import re
from contextlib import suppress
from pathlib import Path

from flytekitplugins.daskpytorch.data.bucket import Listed
from flytekitplugins.daskpytorch.data.image_index import write_whole
from flytekitplugins.daskpytorch.process.private_folder import make_private

logger = logging.getLogger(__name__)

OWN_FOLDER = "daskpytorch-images"
OURS = re.compile(r"[0-9a-f]{64}|\.[0-9a-f]{64}-\w+")
"""Names of our files, and of those that a process was writing when it ended."""
LOW_WATER = 0.9
"""Of the size: what is left when the files that were used longest ago are removed."""
SHARE_BETWEEN_LOOKS = 0.03
"""Of the size: what a process writes before it looks again at what all have written."""
DIGEST_SIZE = 16
"""Bytes; of a checksum at the end of each file, since disks fill up and machines go down in the middle of a write."""


class ImageCache:
    """A folder of whole files. Its size goes above its bound by little, and by no more for every process that writes.

    No library does this without a database that all processes lock, or without loading pickles.
    """

    def __init__(self, folder: str | os.PathLike[str], num_bytes: int) -> None:
        """Keep so many bytes in a folder of this machine; what lies in it besides is left alone.

        Raises:
            PermissionError: Another user owns the folder that is made in there, or can write to it.
        """
        self._folder = Path(folder) / OWN_FOLDER
        self._num_bytes = num_bytes
        self._num_written = num_bytes  # look at the first write
        make_private(self._folder)

    def get(self, bucket: str, listed: Listed) -> bytes | None:
        """The object, if it is there and whole."""
        path = self._path(bucket, listed)
        try:
            content = path.read_bytes()
            os.utime(path)  # the last use, which mounted file systems often do not keep
        except OSError:
            return None
        body = content[:-DIGEST_SIZE]
        return body if len(body) == listed.size and _digest(body) == content[-DIGEST_SIZE:] else None

    def put(self, bucket: str, listed: Listed, body: bytes) -> None:
        """Keep an object. A disk that is full costs a line in the log, no more."""
        path = self._path(bucket, listed)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            write_whole(path, body + _digest(body))
        except OSError as error:
            logger.warning("the cache of pictures in %s cannot be written: %s", self._folder, error)
            return
        self._num_written += len(body) + DIGEST_SIZE
        if self._num_written >= SHARE_BETWEEN_LOOKS * self._num_bytes:
            self._num_written = 0
            self._make_room()

    def _path(self, bucket: str, listed: Listed) -> Path:
        name = hashlib.sha256(f"{bucket}/{listed.key}\0{listed.etag}".encode()).hexdigest()
        return self._folder / name[:2] / name

    def _make_room(self) -> None:
        """Remove what was used longest ago, where there is too much; others may do the same at the same time."""
        found: list[tuple[float, int, str]] = []
        for shelf in os.scandir(self._folder):
            if shelf.is_dir():
                for file in os.scandir(shelf):
                    with suppress(FileNotFoundError):
                        if not OURS.fullmatch(file.name):
                            continue
                        status = file.stat()
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
