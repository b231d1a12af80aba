"""Results of a training as files on the driver's side, while it runs: ranks submit them, the driver writes them.

`submit_result` runs in a rank, `process_results` in the driver. Between them results travel over the gang's own
connections, never through the Dask scheduler.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import CancelledError, Future, wait
from typing import Any

from flytekitplugins.daskpytorch.blame import StoppedEarlyError
from flytekitplugins.daskpytorch.context import current_rank
from flytekitplugins.daskpytorch.inbox import GangFuture, Inbox
from flytekitplugins.daskpytorch.result_folder import ResultFolder, ResultPathError

__all__ = ["DaskResultsHandler", "ResultPathError"]

POLL_INTERVAL = 0.05
"""Seconds between looks for new results."""


class DaskResultsHandler:
    """Brings what ranks submit into a folder of the driver's, as files.

    What a gang submits is kept until a handler processes that gang: nothing is lost that is submitted before
    `process_results` is called, or in the last moment before a rank fails. The key tells several handlers of one gang
    apart. Ranks import a function's module anew, so there a module-level `DaskResultsHandler(uuid.uuid4().hex)` has
    another key than in the driver; therefore results with a key that no handler in the driver's process has go to
    whichever handler processes their gang. To tell handlers apart, give them fixed keys.
    """

    def __init__(self, pub_sub_key: str | None = None) -> None:
        """Make one end of the way; the other is made, or arrives pickled, in the other process.

        Args:
            pub_sub_key: Tells several handlers of one gang apart; None stands for an empty one.
        """
        self.pub_sub_key = pub_sub_key or ""
        _keys.note(self)

    def submit_result(self, path: str, data: str | bytes) -> None:
        """Have the driver write a file; called in a rank of `dispatch.run` or `dispatch.map`.

        When it returns, the result has left this process and outlives it, though not a loss of the whole worker. A
        later result of this rank for the same path replaces this one.

        Args:
            path: Relative to the driver's prefix.
            data: The file's content; text is written as UTF-8.

        Raises:
            TypeError: The path is not a string, or the data neither string nor bytes.
            RuntimeError: This process is not a rank whose results a driver can process.
        """
        if not isinstance(path, str):
            raise TypeError(f"submit_result takes a path as str, not {type(path).__name__}")
        if not isinstance(data, (str, bytes)):
            raise TypeError(
                f"submit_result({path!r}, ...) takes str or bytes, not {type(data).__name__}; "
                "make it one of these first, with json.dumps or pickle.dumps, say."
            )
        rank = current_rank()
        if rank.submit is None:
            raise RuntimeError(
                f"submit_result({path!r}, ...) was called where no driver can process results. Call it in the "
                "function that dispatch.run or dispatch.map calls, in the rank's own process (not in one that it "
                "starts, such as a DataLoader worker). The ranks of DaskDDP and SpawnDDP tasks return their results "
                "instead; a DaskCluster task may use dispatch.run."
            )
        rank.progress.move()
        rank.submit(self.pub_sub_key, path, data.encode() if isinstance(data, str) else data)

    def process_results(
        self, prefix: str | os.PathLike[str], futures: Iterable[Future[Any]], raise_errors: bool = True
    ) -> None:
        """Write all that the gangs of these futures submit, as it comes, until they have ended.

        Each file is written whole or not at all. May be called again, or late, or for some of a gang's futures; a
        result is written once. Paths that are empty or absolute, that have a `..` or follow a symbolic link out of
        the prefix are not written; each costs a line on standard error.

        Args:
            prefix: The folder to write below; made if need be.
            futures: What `dispatch.run` returned, or futures of several gangs.
            raise_errors: When all is written, raise the error of the first future that failed, or else that of the
                first path that was refused.

        Raises:
            ResultPathError: A rank submitted a path that is not to be written; the rest was.
            GangError: A gang failed; or whatever else its future raises.
            OSError: The prefix cannot be written, at once. What is not written yet is kept for another call.
            TypeError: Not a future of a gang.
        """
        futures = list(futures)
        inboxes = _inboxes(futures)
        folder = ResultFolder(prefix)
        refusals: list[ResultPathError] = []
        pending = futures
        while pending:
            wait(pending, POLL_INTERVAL)
            pending = [future for future in pending if not future.done()]
            for inbox in inboxes:  # after the look at the futures: what a gang submitted is here before they are done
                refusals += self._write_out(inbox, folder)
        if raise_errors:
            _raise_first([*map(_error_of, futures), *refusals[:1]])

    def _write_out(self, inbox: Inbox, folder: ResultFolder) -> list[ResultPathError]:
        """Write what waits for this handler; the refusals."""
        others = _keys.alive() - {self.pub_sub_key}
        claimed = inbox.claim(lambda key: key not in others)
        refusals = []
        try:
            while claimed:
                submission = claimed[0]
                try:
                    folder.write(submission.rank, submission.path, inbox.read(submission))
                except ResultPathError as error:
                    sys.stderr.write(f"{error}\n")
                    refusals.append(error)
                inbox.drop(claimed.popleft())
        finally:
            inbox.restore(claimed)  # where the disk is full, or the user has interrupted it
        return refusals


class _LiveKeys:
    """The keys of the handlers that this process has now."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a handler may be collected by the thread that holds it
        self._count: Counter[str] = Counter()

    def note(self, handler: DaskResultsHandler) -> None:
        with self._lock:
            self._count[handler.pub_sub_key] += 1
        weakref.finalize(handler, self._forget, handler.pub_sub_key)

    def alive(self) -> set[str]:
        with self._lock:
            return {key for key, count in self._count.items() if count > 0}

    def _forget(self, key: str) -> None:
        with self._lock:
            self._count[key] -= 1


_keys = _LiveKeys()


def _inboxes(futures: Iterable[Future[Any]]) -> list[Inbox]:
    """Those of all the gangs, each once."""
    inboxes = []
    for future in futures:
        if not isinstance(future, GangFuture):
            raise TypeError(
                f"process_results takes what dispatch.run returned, or a list of such futures, not {future!r}"
            )
        if future.inbox not in inboxes:
            inboxes.append(future.inbox)
    return inboxes


def _error_of(future: Future[Any]) -> BaseException | None:
    error = CancelledError() if future.cancelled() else future.exception()
    return None if isinstance(error, StoppedEarlyError) else error  # which is no failure


def _raise_first(errors: Iterable[BaseException | None]) -> None:
    for error in errors:
        if error is not None:
            raise error
