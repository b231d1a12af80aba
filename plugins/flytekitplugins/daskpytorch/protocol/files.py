"""A storage as gangs use it: a file system of fsspec, in which files appear whole or not at all. Runs in the driver."""

import contextlib
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from flytekitplugins.daskpytorch.process.private_folder import WRITABLE, refuse_foreign

CHUNK = 25 << 20
"""Bytes in one request of an upload to S3 or Google Cloud. Clients hold ten requests in memory, by default of 50 MB."""


def unusable(setting: str, folder: str, error: OSError) -> OSError:
    """Return the error of a storage address that cannot be used: of the same kind, with setting and address named."""
    kind = next(kind for kind in (FileNotFoundError, PermissionError, OSError) if isinstance(error, kind))
    return kind(
        f"{setting}: {folder} cannot be used ({type(error).__name__}: {error}). Check the address, "
        "that its bucket or disk is there, and that the driver may write to it."
    )


def full_path(folder: str) -> str:
    """Return the absolute path of a path or `file://` URL."""
    return str(LocalFileSystem._strip_protocol(folder))  # noqa: SLF001 - fsspec has no other way


class Files:
    """Whole files of one file system."""

    def __init__(self, fs: Any) -> None:
        self.fs = fs
        self.is_local = isinstance(fs, LocalFileSystem)
        """Where a file is renamed into its place; object stores do it by themselves."""

    def refuse_foreign(self, folder: str, *, with_folders: bool = False) -> None:
        """Check that nobody else can have written the files of a folder, and of those in it, where it is on a disk.

        Raises:
            PermissionError: Another user owns one of them, or can write to it.
        """
        for each in (Path(folder), *(Path(folder).glob("*") if with_folders else ())) if self.is_local else ():
            if each.is_dir():
                refuse_foreign(each)

    def path(self, folder: str) -> str:
        """Return a folder's full name, without a slash at its end."""
        return full_path(folder) if self.is_local else folder.rstrip("/")

    def below(self, folder: str) -> list[str]:
        """Return the paths of all files in a folder and its sub-folders, relative to the folder."""
        self.fs.invalidate_cache()
        root = self.fs._strip_protocol(folder)  # noqa: SLF001
        return [path.removeprefix(f"{root}/") for path in self.fs.find(root)]

    def folders(self, folder: str) -> list[str]:
        """Return the names of the folders in a folder; none if the folder does not exist."""
        self.fs.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            return [
                each["name"].rpartition("/")[2]
                for each in self.fs.ls(folder, detail=True)
                if each["type"] == "directory"
            ]
        return []

    def read(self, path: str) -> bytes:
        """Return the content of a file."""
        return bytes(self.fs.cat_file(path))

    def write(self, path: str, data: bytes) -> None:
        """Write a file with this content."""
        if self.is_local:
            _rename_into(path, lambda unfinished: unfinished.write_bytes(data))
        else:
            self.fs.pipe_file(path, data)

    def create(self, path: str, data: bytes) -> bool:
        """Write a file with this content and return True, or return False if the file exists.

        Of two callers at once, both may be told True by a store without exclusive creation.
        """
        if self.is_local:
            return _link_into(Path(path), data)
        try:
            self.fs.pipe_file(path, data, mode="create")
        except FileExistsError:
            return False
        except Exception:  # of a store, or an older fsspec, without exclusive creation
            self.fs.invalidate_cache()
            if self.fs.exists(path):
                return False
            self.fs.pipe_file(path, data)
        return True

    def remove(self, folder: str, is_ours: Callable[[str], bool]) -> None:
        """Remove the files of a folder whose names are ours; and the folder, and the one above it, if they are empty.

        Raises:
            OSError: Some are still there; s3fs, say, passes over objects that it may not remove.
        """
        if paths := self._ours(folder, is_ours):
            self.fs.rm(paths)
            if left := self._ours(folder, is_ours):
                raise OSError(f"{left[0]} is still there")
        if self.is_local:
            with contextlib.suppress(OSError):  # there is something else in it
                Path(folder).rmdir()
                Path(folder).parent.rmdir()

    def _ours(self, folder: str, is_ours: Callable[[str], bool]) -> list[str]:
        return [f"{folder}/{name}" for name in self.below(folder) if is_ours(name)]

    def get(self, path: str, to: Path) -> None:
        """Download a file."""
        self.fs.get_file(path, str(to))

    def put(self, source: Path, path: str) -> None:
        """Upload a file that nobody changes afterwards: on one disk, both names may stand for the same bytes."""
        if self.is_local:
            _rename_into(path, lambda unfinished: _link_or_copy(source, unfinished))
        elif {"s3", "gs"} & {self.fs.protocol, *self.fs.protocol}:
            self.fs.put_file(str(source), path, chunksize=CHUNK)
        else:
            self.fs.put_file(str(source), path)


def _link_or_copy(source: Path, target: Path) -> None:
    if source.stat().st_uid == os.geteuid():  # another user's would be refused when it is to be read
        with contextlib.suppress(OSError):  # another file system, or one without links
            os.link(source, target)
            return
    shutil.copyfile(source, target)


def _link_into(target: Path, data: bytes) -> bool:
    unfinished = Path(f"{target}.{uuid.uuid4().hex}")
    _rename_into(str(unfinished), lambda new: new.write_bytes(data))
    try:
        os.link(unfinished, target)
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        with contextlib.suppress(FileExistsError), target.open("xb") as file:
            file.write(data)
            return True
        return False
    finally:
        unfinished.unlink()
    return True


def _rename_into(path: str, write: Callable[[Path], object]) -> None:
    """Have a file appear whole, which stays whole if the power fails afterwards."""
    target = Path(path)
    target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    unfinished = target.with_name(f"{target.name}.{uuid.uuid4().hex}")
    try:
        write(unfinished)
        with unfinished.open("rb") as file:
            unfinished.chmod(os.fstat(file.fileno()).st_mode & ~WRITABLE)  # whatever the umask is
            os.fsync(file)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
