"""Writes results below one folder: each file whole, and none outside. Runs in the driver."""

import errno
import os
import uuid
from collections.abc import Iterable
from pathlib import Path

from flytekitplugins.daskpytorch.process.folders import replacing

MAX_FOLDERS = 100
"""Maximum number of folders in the path of a submitted file. Functions that upload and remove folders recurse once per
folder, at most 1,000 times."""
DISK_ERRORS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN),
    *(errno.EFBIG, errno.ESTALE, errno.ETIMEDOUT),
)
"""Error numbers (`errno`) of the whole disk, after which a write can be repeated. Other errors concern one path."""


class ResultPathError(ValueError):
    """A rank submitted a file whose path is refused, for example a path that leads out of the folder for results.

    Examples:
        >>> from flytekitplugins.daskpytorch import dispatch, results
        >>> handler = results.DaskResultsHandler()
        >>> def train() -> None:
        ...     handler.submit_result("../notes.txt", "went well")
        >>> try:
        ...     handler.process_results("notes", dispatch.run(client, train))
        ... except results.ResultPathError as error:
        ...     print(error)
        the result that rank ... submitted for the path '../notes.txt' was not written below notes: ...
    """

    def __init__(self, rank: int, path: str, prefix: str, reason: str) -> None:
        super().__init__(
            f"the result that rank {rank} submitted for the path {path!r} was not written below {prefix}: {reason}"
        )
        self.rank = rank
        self.path = path
        self.prefix = prefix
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.rank, self.path, self.prefix, self.reason))


class ResultFolder:
    """Folder of the driver for files that ranks submit. A missing folder is made."""

    def __init__(self, prefix: str | os.PathLike[str], name: str | None = None) -> None:
        self.name = name or os.fspath(prefix)
        """Name of the folder in error messages."""
        Path(prefix).mkdir(parents=True, exist_ok=True)
        self._root = os.path.realpath(prefix).rstrip("/")
        self._unfinished = f".unfinished-{uuid.uuid4().hex}"

    def write(self, rank: int, path: str, pieces: Iterable[bytes]) -> None:
        """Write one file, and replace an earlier file of the same path.

        Raises:
            ResultPathError: The path is not relative, leads out of the folder, is too deep, or names a folder.
            OSError: The file cannot be written now.
        """
        if (reason := _objection(path)) is not None:
            raise ResultPathError(rank, path, self.name, reason)
        try:
            self._write(self._resolve(path), pieces)
        except OSError as error:
            is_writable = os.access(self._root, os.W_OK | os.X_OK, effective_ids=True)
            if error.errno is None or error.errno in DISK_ERRORS or not is_writable:
                raise
            raise ResultPathError(rank, path, self.name, os.strerror(error.errno)) from error
        except ValueError as error:  # a link to elsewhere, a NUL, a lone surrogate
            raise ResultPathError(rank, path, self.name, str(error)) from error

    def _resolve(self, path: str) -> Path:
        target = os.path.realpath(f"{self._root}/{path}")
        if not target.startswith(f"{self._root}/"):
            raise ValueError(f"it leads to {target}")
        return Path(target)

    def _write(self, target: Path, pieces: Iterable[bytes]) -> None:
        with replacing(target, target.with_name(self._unfinished)) as unfinished:
            unfinished.parent.mkdir(parents=True, exist_ok=True)
            with unfinished.open("wb") as file:
                file.writelines(pieces)


def _objection(path: str) -> str | None:
    if not path:
        return "it is empty"
    if path.startswith("/"):
        return "it is absolute; paths are relative to the prefix"
    if ".." in path.split("/"):
        return "it has a '..'"
    if path.endswith("/"):
        return "it names a folder"
    if path.count("/") > MAX_FOLDERS:
        return f"it is {path.count('/')} folders deep, and may be {MAX_FOLDERS}"
    return None
