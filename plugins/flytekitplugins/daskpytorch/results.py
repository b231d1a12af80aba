"""Files that ranks submit during a training, and that the driver writes below a folder.

Results travel over the gang's connections, not through the Dask scheduler. The driver of a task writes them at its end,
by `TaskResults`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import CancelledError, Future, wait
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flytekitplugins.daskpytorch.context import current_rank
from flytekitplugins.daskpytorch.driver.futures import GangFuture
from flytekitplugins.daskpytorch.driver.received import ReceivedResults
from flytekitplugins.daskpytorch.driver.state import Deadlines
from flytekitplugins.daskpytorch.errors import PreemptedError, StoppedEarlyError
from flytekitplugins.daskpytorch.process.folders import replacing, scratch_folder
from flytekitplugins.daskpytorch.process.streams import say
from flytekitplugins.daskpytorch.process.worker import in_thread
from flytekitplugins.daskpytorch.protocol.files import link_or_copy
from flytekitplugins.daskpytorch.protocol.host import Execution

if TYPE_CHECKING:
    from flytekit.types.directory import FlyteDirectory


__all__ = ["DaskResultsHandler", "ResultPathError"]

POLL_INTERVAL = 0.05
"""Seconds between two checks for submitted files."""
OF_PATH = (errno.EACCES, errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL)
"""Errors (`errno`) that concern one path. After others, of the whole disk, a write can be repeated."""
FAILED_LIMIT = 60.0


class DaskResultsHandler:
    """Takes files that ranks submit, and writes them to a folder on the driver's machine.

    The files of a `DaskDDP` or `SpawnDDP` task go to a folder that `directory` returns, and that rank 0 may return as
    an output. For gangs of `dispatch.run` and `dispatch.map`, call `process_results`.

    Submitted files are kept until a handler processes their gang, also if their rank fails.

    All handlers of a gang share its files. Each file is written once, by the first handler that processes the gang.

    Examples:
        >>> from pathlib import Path
        >>> from flytekitplugins.daskpytorch import current_rank, dispatch, results
        >>> handler = results.DaskResultsHandler()
        >>> def train() -> None:
        ...     handler.submit_result(f"rank-{current_rank().rank}/notes.txt", "went well")
        >>> handler.process_results("notes", dispatch.run(client, train))
        >>> sorted(path.as_posix() for path in Path("notes").rglob("*.txt"))
        ['notes/rank-0/notes.txt', 'notes/rank-1/notes.txt']
    """

    def __init__(self, pub_sub_key: str | None = None) -> None:
        """Make a handler in the driver or in a rank.

        Args:
            pub_sub_key: Has no effect. dask-pytorch-ddp has this argument.
        """

    def submit_result(self, path: str, data: str | bytes) -> None:
        """Send a file to the driver. Call it in a rank.

        When the call returns, the file survives this process's end, but not the loss of the whole worker. A later file
        of this rank with the same path replaces this one.

        Args:
            path: Path relative to the `prefix` of `process_results`, or to the folder that `directory` returns.
            data: Content of the file. Text is written as UTF-8.

        Raises:
            TypeError: The path is not a string, or the data neither string nor bytes.
            ValueError: The path is empty.
            RuntimeError: This process is not a rank.
        """
        if not isinstance(path, str):
            raise TypeError(f"submit_result takes a path as str, not {type(path).__name__}")
        if not isinstance(data, (str, bytes)):
            raise TypeError(
                f"submit_result({path!r}, ...) takes str or bytes, not {type(data).__name__}; "
                "make it one of these first, with json.dumps or pickle.dumps, say."
            )
        if not path:
            raise ValueError("submit_result('', ...) takes a path of at least one character")
        rank = current_rank()
        if not rank.link.takes_results:
            raise RuntimeError(
                f"submit_result({path!r}, ...) was called outside a rank, where no driver takes results. Call it in "
                "the function that dispatch.run or dispatch.map calls, or in that of a DaskDDP or SpawnDDP task, and "
                "there in the rank's own process (not in one that it starts, such as a DataLoader worker)."
            )
        rank.progress.move()
        rank.link.submit(path, data.encode() if isinstance(data, str) else data)

    def directory(self) -> FlyteDirectory:
        """Return the folder of all files that the ranks of this task submit, for rank 0 to return as an output.

        The folder has the files of all handlers and ranks, and is complete when the task has ended. Each attempt of a
        task has a new folder.

        Raises:
            RuntimeError: This process is not a rank of a `DaskDDP` or `SpawnDDP` task.
        """
        folder: FlyteDirectory | None = current_rank().link.results_folder()
        if folder is None:
            raise RuntimeError(
                "directory() was called outside a rank of a DaskDDP or SpawnDDP task, where no folder belongs to the "
                "task. Call it in the task's function, in the rank's own process (not in one that it starts, such as "
                "a DataLoader worker). With dispatch.run and dispatch.map, process_results(prefix, futures) writes "
                "the files below a folder of yours; a DaskCluster task may return that as FlyteDirectory(prefix)."
            )
        return folder

    def process_results(
        self, prefix: str | os.PathLike[str], futures: Iterable[Future[Any]], raise_errors: bool = True
    ) -> None:
        """Write the files that the gangs of these futures submit, until the gangs have ended.

        Each file is written whole or not at all, and once. The call may come late, or be repeated. Paths that are empty
        or absolute, have a `..`, or follow a symbolic link out of the prefix are refused. Each refusal is reported in a
        line on standard error.

        Args:
            prefix: The folder to write to. Made if it does not exist.
            futures: The futures that `dispatch.run` or `dispatch.map` returned, or some of them.
            raise_errors: After all files are written, raise the error of the first failed future, or else of the first
                refused path.

        Raises:
            ResultPathError: A rank submitted a refused path. All other files were written.
            GangError: A gang failed. A future may raise other exceptions, too.
            OSError: The prefix cannot be written. The call ends at once, and keeps the other files for another call.
            TypeError: A future does not belong to a gang.
        """
        futures = list(futures)
        all_received: dict[ReceivedResults, None] = {}
        for future in futures:
            if not isinstance(future, GangFuture):
                raise TypeError(
                    f"process_results takes what dispatch.run returned, or a list of such futures, not {future!r}"
                )
            all_received[future.received] = None
        folder = ResultFolder(prefix)
        refusals: list[ResultPathError] = []
        pending = futures
        while pending:
            wait(pending, POLL_INTERVAL)
            pending = [future for future in pending if not future.done()]
            # Written after the check of the futures: a gang's files arrive before its futures are done.
            for received in all_received:
                refusals += write_out(received, folder)
        if raise_errors:
            for error in (*map(_error_of, futures), *refusals):
                if error is not None:
                    raise error


def write_out(received: ReceivedResults, folder: ResultFolder) -> list[ResultPathError]:
    """Write the files that ranks have submitted, and return an error, which is also logged, for each refused path.

    Raises `OSError` if the folder cannot be written. The remaining files are kept.
    """
    refusals: list[ResultPathError] = []

    def write(rank: int, path: str, file: Path) -> None:
        try:
            folder.take(rank, path, file)
        except ResultPathError as error:
            refusals.append(error)
            sys.stderr.write(f"{error}\n")

    received.write_files(write)
    return refusals


def _error_of(future: Future[Any]) -> BaseException | None:
    if isinstance(future, GangFuture) and future.is_missing:
        return None
    error = CancelledError() if future.cancelled() else future.exception()
    return None if isinstance(error, StoppedEarlyError) else error  # an early stop is no failure


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


class ResultFolder:
    def __init__(self, prefix: str | os.PathLike[str], name: str | None = None) -> None:
        self.name = name or os.fspath(prefix)
        Path(prefix).mkdir(parents=True, exist_ok=True)
        self._root = os.path.realpath(prefix).rstrip("/")

    def take(self, rank: int, path: str, file: Path) -> None:
        """Give a file its path. ResultPathError: the path is refused. OSError: the file cannot be written now."""
        try:
            target = self._resolve(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            with replacing(target, target.with_name(f".unfinished-{uuid.uuid4().hex}")) as unfinished:
                return link_or_copy(file, unfinished)
        except OSError as error:
            is_writable = os.access(self._root, os.W_OK | os.X_OK, effective_ids=True)
            if error.errno not in OF_PATH or not is_writable:
                raise
            reason = os.strerror(error.errno)
        except ValueError as error:  # a null byte, half of a surrogate pair, or a path out of the folder
            reason = str(error)
        raise ResultPathError(
            f"the result that rank {rank} submitted for the path {path!r} was not written below {self.name}: {reason}"
        )

    def _resolve(self, path: str) -> Path:
        if path.startswith("/") or path.endswith("/"):
            raise ValueError("it is absolute, or names a folder")
        target = os.path.realpath(f"{self._root}/{path}")
        if not target.startswith(f"{self._root}/"):
            raise ValueError(f"it leads to {target}")
        return Path(target)


# ---- Of a task


class TaskResults:
    """Receives the files that ranks of a task submit, and stores them in a folder of the task's output storage."""

    def __init__(self, grace_period: float, execution: Execution) -> None:
        self._preempted_limit = Deadlines(grace_period).results
        self._execution = execution
        self.folder = str(execution.new_folder())
        path = self.folder.removeprefix("file://")
        self._path = None if "://" in path else Path(path)
        self.has_files = False

    @contextlib.contextmanager
    def received(self) -> Iterator[ReceivedResults]:
        received = ReceivedResults()
        place = contextlib.nullcontext(self._path) if self._path else scratch_folder("daskpytorch-results-")
        with place as folder, contextlib.closing(received):
            try:
                yield received
            except BaseException as error:
                limit = self._preempted_limit if isinstance(error, PreemptedError) else FAILED_LIMIT
                try:
                    in_thread(partial(self._deliver, received, folder), "daskpytorch-results").result(limit)
                except Exception as lost:  # storage clients raise errors of any class
                    say(
                        f"some results of the ranks did not reach {self.folder} within {limit:g} s "
                        f"({type(lost).__name__}: {lost}). These files are lost: check the disk and the task's access "
                        "to its output storage"
                    )
                raise
            self._deliver(received, folder)
            if not self.has_files and received.folder_is_wanted:
                self._make_empty_folder()

    def _deliver(self, received: ReceivedResults, folder: Path) -> None:
        if not received.is_empty:
            write_out(received, ResultFolder(folder, self.folder))
        if any(path.is_file() for path in folder.rglob("*")):
            if self._path is None:
                self._execution.put_folder(folder, self.folder)
            self.has_files = True

    def _make_empty_folder(self) -> None:
        if self._path is None:  # object stores have no folders, so an object marks the empty folder
            self._execution.filesystem(self.folder).pipe_file(f"{self.folder}/", b"")
        else:
            self._path.mkdir(parents=True, exist_ok=True)
