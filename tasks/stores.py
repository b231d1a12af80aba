"""Stores for a registry's objects, in a local folder or a bucket, with atomic writes. Runs in ordinary tasks."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

from flytekitplugins.daskpytorch import url_to_fs

NUM_RIVALS = 4
"""Number of simultaneous attempts to create an object, in the check that only one attempt succeeds."""
MAX_TRIES = 5
"""Maximum number of attempts to create an object if S3 answers 409, which asks for a retry."""


def open_store(uri: str, storage_options: Mapping[str, Any] | None = None) -> Folder | Bucket:
    """Return the store at a URI.

    Args:
        uri: A local folder, or `s3://bucket/prefix`.
        storage_options: Additional options of fsspec for the access.

    Raises:
        ValueError: The URI is neither a local folder nor `s3://bucket/prefix`.
    """
    fs, root = url_to_fs(uri, **(storage_options or {}))
    if isinstance(fs, LocalFileSystem) and uri:
        return Folder(Path(root))
    if "s3" in fs.protocol and root:
        return Bucket(fs, root)
    raise ValueError(
        f"a registry cannot be kept at {uri!r}: it needs a store where of two that create one object at once only one "
        "succeeds, which is known of local folders and s3://bucket/prefix. Give one of these."
    )


class Folder:
    """Store in a local folder, which several machines may share. Keys look like `folder/name`."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def names(self, folder: str) -> list[str]:
        """Return the sorted names in a folder, without partial files of killed processes. A missing folder is empty."""
        try:
            return sorted(path.name for path in self._path(folder).iterdir() if not path.name.startswith("."))
        except FileNotFoundError:
            return []

    def read(self, keys: Sequence[str]) -> list[bytes]:
        """Return the files' bytes. Raise FileNotFoundError if a file is missing."""
        return [self._path(key).read_bytes() for key in keys]

    def download(self, key: str, path: Path) -> None:
        """Copy a file to a local path. Raise FileNotFoundError if the file is missing."""
        shutil.copyfile(self._path(key), path)

    def write(self, key: str, source: Path | bytes) -> None:
        """Write a file, and replace an existing one."""
        with self._whole(key, source) as whole:
            whole.replace(self._path(key))

    def create(self, key: str, data: bytes) -> None:
        """Create a file, or raise FileExistsError if it exists. Only one of simultaneous calls succeeds."""
        with self._whole(key, data) as whole:
            self._path(key).hardlink_to(whole)  # fails if the file exists, unlike a rename

    def check(self) -> None:
        """Check that the folder can be written and its file system has hard links. Raise RuntimeError if not."""
        key = f"probes/{uuid.uuid4().hex}"
        try:
            self.create(key, b"")
        except OSError as error:
            raise RuntimeError(
                f"the registry at {self._root} cannot be written, or its file system has no hard links: {error}. "
                "Give a folder that you may write to, on a file system with hard links."
            ) from error
        self._path(key).unlink()

    def _path(self, key: str) -> Path:
        """Return the file's path.

        Raises:
            PermissionError: A link leads out of the folder.
        """
        path = self._root / key
        if not path.resolve().is_relative_to(self._root.resolve()):
            raise PermissionError(f"{path} leads to {path.resolve()}, which is outside the registry; remove the link")
        return path

    @contextmanager
    def _whole(self, key: str, source: Path | bytes) -> Iterator[Path]:
        """Yield a temporary file with all bytes on the disk, which the caller only has to rename or link."""
        folder = self._path(key).parent
        folder.mkdir(parents=True, exist_ok=True)
        whole = folder / f".{uuid.uuid4().hex}"
        try:
            if isinstance(source, bytes):
                whole.write_bytes(source)
            else:
                shutil.copyfile(source, whole)
            _flush(whole)
            yield whole
        finally:
            whole.unlink(missing_ok=True)
        _flush(folder)
        _flush(folder.parent)


class Bucket:
    """Store in a bucket of S3, or in a prefix of a bucket, with the methods of `Folder`."""

    def __init__(self, fs: AbstractFileSystem, root: str) -> None:
        self._fs = fs
        self._root = root.rstrip("/")

    def names(self, folder: str) -> list[str]:
        """Return the last parts of all keys in a folder, sorted, by a new request to S3. A missing folder is empty."""
        try:
            paths = self._fs.ls(f"{self._root}/{folder}", detail=False, refresh=True)
        except FileNotFoundError as error:
            if _code(error):  # S3's own answer: the bucket is missing
                raise FileNotFoundError(
                    f"the bucket of the registry s3://{self._root} does not exist: {error}. Create it, or give another "
                    "registry"
                ) from error
            return []
        return sorted(path.rpartition("/")[2] for path in paths)

    def read(self, keys: Sequence[str]) -> list[bytes]:
        """Return the objects' bytes, by up to eight requests at a time. Raise FileNotFoundError if one is missing."""
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(self._fs.cat_file, [f"{self._root}/{key}" for key in keys]))

    def download(self, key: str, path: Path) -> None:
        """Download an object to a local path. Raise FileNotFoundError if the object is missing."""
        self._fs.get_file(f"{self._root}/{key}", str(path))

    def write(self, key: str, source: Path | bytes) -> None:
        """Upload an object, and replace an existing one."""
        if isinstance(source, bytes):
            self._fs.pipe_file(f"{self._root}/{key}", source)
        else:
            self._fs.put_file(str(source), f"{self._root}/{key}")

    def create(self, key: str, data: bytes) -> None:
        """Upload an object with `If-None-Match: *`, or raise FileExistsError if it exists."""
        for attempt in range(1, MAX_TRIES + 1):
            try:
                self._fs.pipe_file(f"{self._root}/{key}", data, mode="create")
            except OSError as error:
                if _code(error) == "PreconditionFailed":
                    raise FileExistsError(f"s3://{self._root}/{key} is there already") from error
                if _code(error) != "ConditionalRequestConflict" or attempt == MAX_TRIES:
                    raise
                time.sleep(0.1 * attempt)
            else:
                return

    def check(self) -> None:
        """Check, in parallel and in sequence, that an object is created only once. Raise RuntimeError if not.

        Some servers ignore the rule.
        """
        key = f"probes/{uuid.uuid4().hex}"
        with ThreadPoolExecutor(NUM_RIVALS) as pool:
            num_created = sum(pool.map(self._creates, [key] * NUM_RIVALS))
        num_created += self._creates(key)
        with suppress(PermissionError):  # a registry does not need the right to delete
            self._fs.rm_file(f"{self._root}/{key}")
        if num_created > 1:
            raise RuntimeError(
                f"the server of s3://{self._root} let {num_created} of {NUM_RIVALS + 1} create one object, though each "
                "asked for it not to be there (If-None-Match: *): retrainings at the same time could undo each "
                "other's promotions. Use Amazon S3, or a version of your server that heeds this."
            )

    def _creates(self, key: str) -> bool:
        try:
            self.create(key, b"")
        except FileExistsError:
            return False
        return True


def _code(error: OSError) -> str:
    """Return S3's error code, which s3fs drops from some errors."""
    answer = getattr(error.__cause__, "response", None)
    return str(answer["Error"]["Code"]) if isinstance(answer, dict) else ""


def _flush(path: Path) -> None:
    """Flush a file's bytes, or a folder's names, to the disk, so that they survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
