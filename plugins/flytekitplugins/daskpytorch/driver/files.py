"""A file system of fsspec's, in which files appear whole or not at all. Runs in the driver."""

import contextlib
import functools
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from flytekitplugins.daskpytorch.process.private_folder import WRITABLE, refuse_foreign


def unusable(setting: str, folder: str, error: OSError) -> OSError:
    """Return the error of a storage address that cannot be used: of the same kind, with setting and address named."""
    kind = next(kind for kind in (FileNotFoundError, PermissionError, OSError) if isinstance(error, kind))
    return kind(
        f"{setting}: {folder} cannot be used ({type(error).__name__}: {error}). Check the address, "
        "that its bucket or disk is there, and that the driver may write to it."
    )


class Files:
    """One file system; also a host's storage, see `protocol.host`."""

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
        """A folder's full name."""
        return str(self.fs._strip_protocol(folder)) if self.is_local else folder.rstrip("/")  # noqa: SLF001 - its way

    def below(self, folder: str) -> list[str]:
        """All files in it, as seen from there."""
        self.fs.invalidate_cache()
        root = self.fs._strip_protocol(folder)  # noqa: SLF001
        return [path.removeprefix(f"{root}/") for path in self.fs.find(root)]

    def folders(self, folder: str) -> list[str]:
        """The names of the folders in it; none where it is not there."""
        self.fs.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            return [
                each["name"].rpartition("/")[2]
                for each in self.fs.ls(folder, detail=True)
                if each["type"] == "directory"
            ]
        return []

    def read(self, path: str) -> bytes:
        """What is in a file."""
        return bytes(self.fs.cat_file(path))

    def write(self, path: str, data: bytes) -> None:
        """Have a file of this."""
        if self.is_local:
            self._rename_into(path, lambda unfinished: unfinished.write_bytes(data))
        else:
            self.fs.pipe_file(path, data)

    def create(self, path: str, data: bytes) -> bool:
        """Have a file of this where there is none; whether there was none. Not every store can tell of two at once."""
        if self.is_local:
            return self._link_into(Path(path), data)
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

    def get_data(self, remote_path: str, local_path: str) -> None:
        """Download a file."""
        self.fs.get_file(remote_path, local_path)

    def put_data(self, local_path: str, remote_path: str) -> None:
        """Upload a file."""
        if self.is_local:
            self._rename_into(remote_path, functools.partial(shutil.copyfile, local_path))
        else:
            self.fs.put_file(local_path, remote_path)

    def get_filesystem_for_path(self, path: str) -> Any:
        """That of all."""
        return self.fs

    def _link_into(self, target: Path, data: bytes) -> bool:
        unfinished = f"{target}.{uuid.uuid4().hex}"
        self.write(unfinished, data)
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
            Path(unfinished).unlink()
        return True

    def _rename_into(self, path: str, write: Callable[[Path], object]) -> None:
        target = Path(path)
        target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        unfinished = target.with_name(f"{target.name}.{uuid.uuid4().hex}")
        try:
            write(unfinished)
            unfinished.chmod(unfinished.stat().st_mode & ~WRITABLE)  # whatever the umask is
            unfinished.replace(target)
        finally:
            unfinished.unlink(missing_ok=True)
