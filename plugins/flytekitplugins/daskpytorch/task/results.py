"""Folder of the files that ranks of a `DaskDDP` or `SpawnDDP` task submit. Runs in the task's driver."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from flytekitplugins.daskpytorch.driver.received import ReceivedResults
from flytekitplugins.daskpytorch.driver.stop_request import Deadlines
from flytekitplugins.daskpytorch.errors import PreemptedError
from flytekitplugins.daskpytorch.process.folders import scratch_folder
from flytekitplugins.daskpytorch.process.log import say
from flytekitplugins.daskpytorch.process.worker import Worker
from flytekitplugins.daskpytorch.protocol.host import Execution
from flytekitplugins.daskpytorch.results import ResultFolder, write_out

PROFILES = "profiles"
"""Name of the results folder's subfolder for traces by `Gang(profile=...)`."""
FAILED_LIMIT = 60.0
"""Timeout, in seconds, for the upload of a failed gang's results. The gang's error is raised afterwards."""
LOST = "These files are lost: check the disk and the task's access to its output storage"
"""End of a notice about results that were not stored."""


class TaskResults:
    """Receiver of the files that ranks of a task submit. Stores them in a folder of the task's output storage."""

    def __init__(self, grace_period: float, execution: Execution) -> None:
        self._preempted_limit = Deadlines(grace_period).results
        self._execution = execution
        self.folder = str(execution.new_folder())
        """Path or URI of the folder with the results, which is made only if a rank submits files or uses the folder."""
        self._is_remote = "://" in self.folder and not self.folder.startswith("file://")
        self.has_files = False
        """True once the results folder has submitted files."""
        self._profiles: list[str] = []

    @contextlib.contextmanager
    def received(self) -> Iterator[ReceivedResults]:
        """During the block, write submitted files to the results folder as they arrive. Upload them at the end.

        Raises:
            OSError: Not all files could be written to the disk. An error of the gang is raised instead.
            Exception: The upload failed. The type depends on the storage. An error of the gang is raised instead.
        """
        received, worker = ReceivedResults(), Worker(name="results")
        with self._local_folder() as folder, contextlib.closing(worker):
            # In a thread, so that a slow disk does not delay the gang's supervisor. If an error persists, the last
            # write raises it.
            received.notify = partial(worker.submit, partial(self._write, received, folder), lambda *_: True)
            try:
                yield received
            except BaseException as error:
                limit = self._preempted_limit if isinstance(error, PreemptedError) else FAILED_LIMIT
                worker.submit(partial(self._deliver, received, folder), self._tell_failure)
                if not worker.flush(limit):
                    say(f"some results of the ranks did not reach {self.folder} within {limit:g} s. {LOST}")
                raise
            worker.flush()
            self._deliver(received, folder)
            if not self.has_files and received.folder_is_wanted:
                self._make_empty_folder()

    def profiles(self) -> dict[str, str]:
        """Return the URIs of the traces by `Gang(profile=...)` in the results folder, by file name."""
        if not self._is_remote:
            self._profiles = _files_below(Path(self.folder.removeprefix("file://")) / PROFILES)
        return {name: f"{self.folder}/{PROFILES}/{name}" for name in self._profiles}

    def _local_folder(self) -> contextlib.AbstractContextManager[Path]:
        if self._is_remote:
            return scratch_folder("daskpytorch-results-")
        return contextlib.nullcontext(Path(self.folder.removeprefix("file://")))

    def _write(self, received: ReceivedResults, folder: Path) -> None:
        """Write all submitted files that have arrived to a local folder.

        Raises:
            OSError: A file cannot be written to the disk. The next call tries again.
        """
        if not received.is_empty:
            write_out(received, ResultFolder(folder, self.folder))

    def _deliver(self, received: ReceivedResults, folder: Path) -> None:
        """Write the remaining files to a local folder, and upload all files if the results folder is remote."""
        self._write(received, folder)
        if any(path.is_file() for path in folder.rglob("*")):
            if self._is_remote:
                self._execution.put_folder(folder, self.folder)
                self._profiles = _files_below(folder / PROFILES)
            self.has_files = True

    def _tell_failure(self, error: Exception, *_: object) -> bool:
        say(f"some results of the ranks did not reach {self.folder} ({type(error).__name__}: {error}). {LOST}")
        return True

    def _make_empty_folder(self) -> None:
        if self._is_remote:  # object stores have no folders, so an object marks the empty folder
            self._execution.filesystem(self.folder).pipe_file(f"{self.folder}/", b"")
        else:
            Path(self.folder.removeprefix("file://")).mkdir(parents=True, exist_ok=True)


def _files_below(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*") if path.is_file())
