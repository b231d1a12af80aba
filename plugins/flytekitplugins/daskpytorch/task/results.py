"""What the ranks of a `DaskDDP` or `SpawnDDP` task submit, as a folder that belongs to the task. Runs in its driver."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from flytekitplugins.daskpytorch.driver.preemption import Deadlines
from flytekitplugins.daskpytorch.driver.received import ReceivedResults
from flytekitplugins.daskpytorch.errors import PreemptedError
from flytekitplugins.daskpytorch.process.log import say
from flytekitplugins.daskpytorch.process.scratch import scratch_folder
from flytekitplugins.daskpytorch.protocol.host import Execution
from flytekitplugins.daskpytorch.results.handler import POLL_INTERVAL, write_out
from flytekitplugins.daskpytorch.results.result_folder import ResultFolder

PROFILES = "profiles"
"""Where ranks put them, in the folder."""
FAILED_LIMIT = 60.0
"""Seconds for the results of a gang that failed to reach storage, so that its error need not wait for ever."""


class TaskResults:
    """Where the results of one task go: a folder of its raw outputs, on this machine or remote."""

    def __init__(self, grace_period: float, execution: Execution) -> None:
        self._preempted_limit = Deadlines(grace_period).results
        self._execution = execution
        self.folder = str(execution.new_folder())
        """Holds everything when the task ends. Not made where nobody submits, unless a rank has asked for it."""
        self._is_remote = "://" in self.folder and not self.folder.startswith("file://")
        self.has_files = False
        """Something has been submitted, and is in the folder."""
        self._profiles: list[str] = []

    @contextlib.contextmanager
    def received(self) -> Iterator[ReceivedResults]:
        """Write what arrives here, as it comes: to the folder, or, if that is remote, to be uploaded at last.

        Raises:
            OSError: The disk took not all of it. An error of the gang's own goes before this and the next.
            Exception: The storage did not take it; which one says its host.
        """
        received = ReceivedResults()
        with self._local_folder() as folder:
            try:
                with self._written(received, folder):
                    yield received
            except BaseException as error:
                limit = self._preempted_limit if isinstance(error, PreemptedError) else FAILED_LIMIT
                self._try_to_deliver(received, folder, limit)
                raise
            self._deliver(received, folder)
            if not self.has_files and received.folder_is_wanted:
                self._make_empty_folder()

    def profiles(self) -> dict[str, str]:
        """The traces and flame graphs in the folder: what they are called, and where they are."""
        if not self._is_remote:
            self._profiles = _files_below(Path(self.folder.removeprefix("file://")) / PROFILES)
        return {name: f"{self.folder}/{PROFILES}/{name}" for name in self._profiles}

    def _local_folder(self) -> contextlib.AbstractContextManager[Path]:
        if self._is_remote:
            return scratch_folder("daskpytorch-results-")
        return contextlib.nullcontext(Path(self.folder.removeprefix("file://")))

    @contextlib.contextmanager
    def _written(self, received: ReceivedResults, folder: Path) -> Iterator[None]:
        """Write files as they come, in a thread of its own: a slow disk must not hold up the gang's supervisor."""
        is_over = threading.Event()

        def work() -> None:
            while not is_over.wait(POLL_INTERVAL):
                with contextlib.suppress(OSError):  # the last write raises what is not over by then
                    self._write(received, folder)

        thread = threading.Thread(target=work, name="daskpytorch-results", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def _write(self, received: ReceivedResults, folder: Path) -> None:
        """Write what has come.

        Raises:
            OSError: The disk does not take it now; it is kept.
        """
        if not received.is_empty:
            write_out(received, ResultFolder(folder, self.folder))

    def _deliver(self, received: ReceivedResults, folder: Path) -> None:
        """Bring the files to the task's folder, if there are any."""
        self._write(received, folder)
        if any(path.is_file() for path in folder.rglob("*")):
            if self._is_remote:
                self._execution.put_folder(folder, self.folder)
                self._profiles = _files_below(folder / PROFILES)
            self.has_files = True

    def _try_to_deliver(self, received: ReceivedResults, folder: Path, limit: float) -> None:
        """Do it within so many seconds, and only say what goes wrong."""

        def deliver() -> None:
            try:
                self._deliver(received, folder)
            except Exception as error:  # whatever a storage's client raises
                say(f"what the ranks have submitted did not all reach {self.folder} ({type(error).__name__}: {error})")

        delivery = threading.Thread(target=deliver, name="daskpytorch-delivery", daemon=True)
        delivery.start()
        delivery.join(limit)
        if delivery.is_alive():
            say(f"what the ranks have submitted did not all reach {self.folder} within {limit:g} s")

    def _make_empty_folder(self) -> None:
        if self._is_remote:  # an object store has no folders; this marker stands for an empty one
            self._execution.filesystem(self.folder).pipe_file(f"{self.folder}/", b"")
        else:
            Path(self.folder.removeprefix("file://")).mkdir(parents=True, exist_ok=True)


def _files_below(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*") if path.is_file())
