"""Reads and writes files in storage, a file system of fsspec. Files appear whole or not at all. Runs in the driver."""

import contextlib
import os
import shutil
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fsspec.core import strip_protocol
from fsspec.implementations.local import LocalFileSystem

from flytekitplugins.daskpytorch.process.folders import WRITABLE, refuse_foreign, replacing

CHUNK = 25 << 20
"""Bytes per request of an upload to S3 or Google Cloud Storage, about half of the clients' default: s3fs and gcsfs hold
ten requests in memory."""
NUM_REMOVERS = 8


def unusable(setting: str, folder: str, error: OSError) -> OSError:
    kind = next(kind for kind in (FileNotFoundError, PermissionError, OSError) if isinstance(error, kind))
    return kind(
        f"{setting}: {folder} cannot be used ({type(error).__name__}: {error}). Check the address, "
        "that its bucket or disk is there, and that the driver may write to it."
    )


def full_path(folder: str) -> str:
    return str(strip_protocol(folder))


class Files:
    def __init__(self, fs: Any) -> None:
        self.fs = fs
        self.is_local = isinstance(fs, LocalFileSystem)
        """On a disk, a file gets its name once complete, while object stores never show incomplete files."""

    def refuse_foreign(self, folder: str, *, with_folders: bool = False) -> None:
        """Raise PermissionError if another user can have written a folder's files, except in a URL."""
        for each in (Path(folder), *(Path(folder).glob("*") if with_folders else ())) if self.is_local else ():
            if each.is_dir():
                refuse_foreign(each)

    def path(self, folder: str) -> str:
        """Return an absolute path or a URL, without a slash at the end."""
        return full_path(folder) if self.is_local else folder.rstrip("/")

    def below(self, folder: str) -> list[str]:
        self.fs.invalidate_cache()
        return list(self.fs.get_mapper(folder))

    def read(self, path: str) -> bytes:
        return bytes(self.fs.cat_file(path))

    def write(self, path: str, data: bytes) -> None:
        if self.is_local:
            _rename_into(path, lambda unfinished: unfinished.write_bytes(data))
        else:
            self.fs.pipe_file(path, data)

    def remove(self, folder: str, is_ours: Callable[[str], object]) -> None:
        """Remove files by their relative path, on a disk also the empty folder and its parent. OSError: some remain."""
        paths = [f"{folder}/{name}" for name in self.below(folder) if is_ours(name)]
        with ThreadPoolExecutor(NUM_REMOVERS) as pool:  # `fs.rm` would take `[`, `*` and `?` of a name for a pattern
            list(pool.map(self.fs.rm_file, paths))
        if self.is_local:
            with contextlib.suppress(OSError):  # the folder is not empty
                Path(folder).rmdir()
                Path(folder).parent.rmdir()

    def get(self, path: str, to: Path) -> None:
        self.fs.get_file(path, str(to))

    def put(self, source: Path, path: str) -> None:
        """Upload a file that does not change afterwards: on the same disk, `path` may become a hard link."""
        if self.is_local:
            _rename_into(path, lambda unfinished: link_or_copy(source, unfinished))
        elif {"s3", "gs"} & {self.fs.protocol, *self.fs.protocol}:
            self.fs.put_file(str(source), path, chunksize=CHUNK)
        else:
            self.fs.put_file(str(source), path)


def link_or_copy(source: Path, target: Path) -> None:
    if source.stat().st_uid == os.geteuid():  # readers refuse another user's file
        with contextlib.suppress(OSError):  # another file system, or one without links
            os.link(source, target)
            return
    shutil.copyfile(source, target)


def _rename_into(path: str, write: Callable[[Path], object]) -> None:
    """Write a file under another name, flush it, and rename it, for readers and against power failures."""
    target = Path(path)
    target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    with replacing(target, target.with_name(f"{target.name}.{uuid.uuid4().hex}")) as unfinished:
        write(unfinished)
        with unfinished.open("rb") as file:
            unfinished.chmod(os.fstat(file.fileno()).st_mode & ~WRITABLE)  # whatever the umask is
            os.fsync(file)
