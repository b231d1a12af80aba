"""The index of a folder of pictures in S3, `prefix/class/image`, made from one listing, and the cache of its pictures.

The cache is on a local disk, for all processes of one machine. A file's name is a hash of the object's bucket, key and
ETag, so that a file is never out of date.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from flytekitplugins.daskpytorch.data.bucket import Listed
from flytekitplugins.daskpytorch.process.folders import make_private, replacing

logger = logging.getLogger(__name__)

IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif")
OWN_FOLDER = "daskpytorch-images"
OURS = re.compile(r"[0-9a-f]{64}|\.[0-9a-f]{64}-\w+")
"""Names of the cache's files. Unfinished ones begin with a dot."""
LOW_WATER = 0.9
SHARE_BETWEEN_LOOKS = 0.03
DIGEST_SIZE = 16
"""Bytes of the checksum at the end of each file. A file that a crash has cut short lacks it."""


@dataclass(frozen=True, kw_only=True)
class ImageIndex:
    bucket: str
    prefix: str
    nested: bool
    files: Sequence[Listed]
    classes: list[str]
    targets: list[int]

    @classmethod
    def of(cls, listing: Iterable[Listed], bucket: str, prefix: str, *, nested: bool) -> ImageIndex:
        folder = prefix.strip("/") + "/" if prefix.strip("/") else ""
        files: list[Listed] = []
        others: Counter[str] = Counter()
        examples: dict[str, str] = {}
        for listed in listing:
            kind = _kind(listed.key, folder)
            if kind == "picture" or (nested and kind == "deeper picture"):
                files.append(listed)
            else:
                others[kind] += 1
                examples.setdefault(kind, listed.key)
        uri = f"s3://{bucket}/{folder}"
        if others["deeper picture"]:
            raise ValueError(_too_deep(uri, folder, others["deeper picture"], examples["deeper picture"]))
        if not files:
            raise FileNotFoundError(_nothing(uri, others, examples))
        for kind in others.keys() - {"folder marker"}:
            logger.warning("%s: left out %d x %s, such as %s", uri, others[kind], kind, examples[kind])
        names = [listed.key.removeprefix(folder).split("/")[0] for listed in files]
        classes = sorted(set(names))
        places = {name: place for place, name in enumerate(classes)}
        targets = [places[name] for name in names]
        return cls(bucket=bucket, prefix=folder, nested=nested, files=files, classes=classes, targets=targets)

    def save(self, path: str | os.PathLike[str]) -> None:
        write_whole(Path(path), json.dumps(asdict(self)).encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ImageIndex:
        try:
            content = json.loads(Path(path).read_text())
            return cls(**{**content, "files": [Listed(*file) for file in content["files"]]})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise ValueError(
                f"{path} is not an index of a folder of pictures ({what}). Delete the file, and the bucket is listed "
                "again"
            ) from error


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically, by a temporary file and a rename. Readers see the old or the new content."""
    with replacing(path, path.with_name(f".{path.name}-{uuid.uuid4().hex}")) as unfinished:
        unfinished.write_bytes(content)


def _kind(key: str, folder: str) -> str:
    parts = key.removeprefix(folder).split("/")
    if not parts[-1]:
        return "folder marker"
    if not parts[-1].lower().endswith(IMAGE_EXTENSIONS) or parts[-1].startswith("."):
        return "file that is no picture by its name"
    if len(parts) == 1:
        return "picture in no class's folder"
    return "picture" if len(parts) == 2 else "deeper picture"


def _too_deep(uri: str, folder: str, count: int, example: str) -> str:
    first = example.removeprefix(folder).split("/")[0]
    return (
        f"{uri} has {count} pictures that lie deeper than class/picture, such as {example}. If {first!r} is a part "
        f"of the data rather than a class, name it: {uri}{first}. If {first!r} is a class, pass nested=True"
    )


def _nothing(uri: str, others: Counter[str], examples: dict[str, str]) -> str:
    there = ", ".join(f"{count} x {kind} (such as {examples[kind]})" for kind, count in others.items())
    return (
        f"{uri} has no pictures. Looked for {uri}CLASS/PICTURE with the extensions {' '.join(IMAGE_EXTENSIONS)}; "
        f"found {there or 'no object whose key begins so'}. Check bucket, prefix and endpoint"
    )


# ---- Cache


class ImageCache:
    """Cache of S3 objects in a local folder up to a maximum size, which each writing process may exceed by about 3 %.

    Several processes may use the folder. The known libraries for such caches load pickles, or lock a shared database.
    """

    def __init__(self, folder: str | os.PathLike[str], num_bytes: int) -> None:
        """Use the subfolder `daskpytorch-images`, up to `num_bytes`.

        Raises `PermissionError` if another user owns the subfolder or can write to it.
        """
        self._folder = Path(folder) / OWN_FOLDER
        self._num_bytes = num_bytes
        self._num_written = num_bytes  # look at the first write
        make_private(self._folder)

    def get(self, bucket: str, listed: Listed) -> bytes | None:
        path = self._path(bucket, listed)
        try:
            content = path.read_bytes()
            os.utime(path)  # the time of the last use, which mounted file systems often do not record
        except OSError:
            return None
        body = content[:-DIGEST_SIZE]
        return body if len(body) == listed.size and _digest(body) == content[-DIGEST_SIZE:] else None

    def put(self, bucket: str, listed: Listed, body: bytes) -> None:
        path = self._path(bucket, listed)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            write_whole(path, body + _digest(body))
        except OSError as error:
            if isinstance(error, FileNotFoundError) and path.parent.is_dir():
                return  # in a small cache, another process made room and took the unfinished file for an old one
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
