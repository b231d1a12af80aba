"""A cache of objects from S3 on a local disk, up to a size. All processes of one machine use it together.

The name of a file is a hash of the object's bucket, key and ETag, so that a file is never out of date.
"""

import hashlib
import logging
import os
import re
from contextlib import suppress
from pathlib import Path

from flytekitplugins.daskpytorch.data.bucket import Listed
from flytekitplugins.daskpytorch.data.image_index import write_whole
from flytekitplugins.daskpytorch.process.folders import make_private

logger = logging.getLogger(__name__)

OWN_FOLDER = "daskpytorch-images"
OURS = re.compile(r"[0-9a-f]{64}|\.[0-9a-f]{64}-\w+")
"""Pattern of the names of the cache's files: finished ones, and unfinished ones, which begin with a dot."""
LOW_WATER = 0.9
"""Share of the cache's maximum size, from 0 to 1, to which a full cache is reduced. The oldest files are removed."""
SHARE_BETWEEN_LOOKS = 0.03
"""Share of the picture cache's maximum size, from 0 to 1, that a process writes between two checks of its size."""
DIGEST_SIZE = 16
"""Number of bytes of the checksum at the end of each file of the cache. A file that a crash has cut short lacks it."""


class ImageCache:
    """Cache of S3 objects in a local folder up to a maximum size, which each writing process may exceed by about 3 %.

    Several processes may use the folder. The known libraries for such caches load pickles, or lock a shared database.
    """

    def __init__(self, folder: str | os.PathLike[str], num_bytes: int) -> None:
        """Use the subfolder `daskpytorch-images` of `folder`, up to `num_bytes` bytes, as the cache.

        Raises:
            PermissionError: Another user owns the cache's folder, or can write to it.
        """
        self._folder = Path(folder) / OWN_FOLDER
        self._num_bytes = num_bytes
        self._num_written = num_bytes  # look at the first write
        make_private(self._folder)

    def get(self, bucket: str, listed: Listed) -> bytes | None:
        """Return an object's bytes. None: the cache lacks the object, or its file is damaged."""
        path = self._path(bucket, listed)
        try:
            content = path.read_bytes()
            os.utime(path)  # the time of the last use, which mounted file systems often do not record
        except OSError:
            return None
        body = content[:-DIGEST_SIZE]
        return body if len(body) == listed.size and _digest(body) == content[-DIGEST_SIZE:] else None

    def put(self, bucket: str, listed: Listed, body: bytes) -> None:
        """Write an object to the cache. If the disk is full, log a line instead of raising an error.

        Args:
            bucket: Name of the bucket.
            listed: The object in the bucket's listing.
            body: Bytes of the object.
        """
        path = self._path(bucket, listed)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            write_whole(path, body + _digest(body))
        except OSError as error:
            logger.warning(
                "the cache of pictures in %s cannot be written: %s. Pictures that are not in the cache are read from "
                "S3 each time. Free disk space, or name another cache_dir",
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
        """If the cache exceeds its maximum size, remove the least recently used files.

        Other processes may remove files at the same time. Files that are still written are the newest.
        """
        found: list[tuple[float, int, str]] = []
        for shelf in os.scandir(self._folder):
            if shelf.is_dir():
                for file in os.scandir(shelf):
                    with suppress(FileNotFoundError):
                        if OURS.fullmatch(file.name):
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
