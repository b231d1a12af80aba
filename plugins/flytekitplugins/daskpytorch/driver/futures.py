"""What the caller of a gang holds: one future per rank. Runs in the driver."""

import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar, overload

from flytekitplugins.daskpytorch.driver.blame import from_user
from flytekitplugins.daskpytorch.driver.brain import GangCancelledError
from flytekitplugins.daskpytorch.driver.received import ReceivedResults
from flytekitplugins.daskpytorch.driver.supervisor import Supervisor
from flytekitplugins.daskpytorch.errors import GangStartError
from flytekitplugins.daskpytorch.process.ctrl_c import deferred
from flytekitplugins.daskpytorch.protocol.failure import raisable

F = TypeVar("F", bound=Future[Any])
TURN = 1.0
"""Seconds from one look at what a waiting thread may have missed to the next."""


class GangFuture(Future[Any]):
    """Settled when its gang ends; leads to what the gang's ranks submit until then."""

    def __init__(self, received: ReceivedResults, end: Callable[[], bool] | None = None) -> None:
        super().__init__()
        self.received = received
        self._end = end
        """Called at Ctrl-C while somebody waits here: has the gang end. Returns False where a rank's debugger gets the
        Ctrl-C. None: Ctrl-C is raised at once."""
        self.is_missing = False
        """The gang has ended well with fewer ranks, as its `min_workers` allows, and this one was not among them."""

    def result(self, timeout: float | None = None) -> Any:
        """As of any future."""
        self._wait(timeout)
        return super().result(None if timeout is None else 0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As of any future."""
        self._wait(timeout)
        return super().exception(None if timeout is None else 0)

    def _wait(self, timeout: float | None) -> None:
        """Wait in turns, since a signal may reach another thread, and its handler is called when the main one wakes.

        So it is with one that comes while the process is suspended: the task would not hear that it is to end.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        if self.done():
            return
        with deferred(self._end) as is_ending:
            while not self.done() and (is_ending() or time.monotonic() < deadline):
                with contextlib.suppress(TimeoutError):
                    super().exception(max(0.0, TURN if is_ending() else min(TURN, deadline - time.monotonic())))


class Futures(Sequence[F]):
    """Several futures, as a sequence."""

    _futures: list[F]

    @overload
    def __getitem__(self, index: int) -> F: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[F]: ...

    def __getitem__(self, index: int | slice) -> F | Sequence[F]:
        return self._futures[index]

    def __len__(self) -> int:
        return len(self._futures)

    def done(self) -> bool:
        """Whether all have ended."""
        return all(future.done() for future in self._futures)


class GangFutures(Futures[GangFuture]):
    """One future per rank of a running gang, in the order of the ranks. They are all settled when the gang ends.

    Of a gang that has ended with fewer workers than it was to have, as its `min_workers` allows, the futures of the
    ranks that there were not raise a `GangStartError`; `result` has the results of the others.
    """

    def __init__(
        self, supervisor: Supervisor, world_size: int, note_unfinished: Callable[[], object] = lambda: None
    ) -> None:
        """Run a gang in a thread; `note_unfinished` is called when it has ended, and not well, before anybody hears."""
        self._supervisor = supervisor
        self._note_unfinished = note_unfinished
        self._num_ranks = world_size
        end = functools.partial(_end, supervisor)
        self._futures = [GangFuture(supervisor.received, end) for _ in range(world_size)]
        for future in self._futures:
            future.set_running_or_notify_cancel()
        threading.Thread(target=self._settle, name="daskpytorch-gang", daemon=True).start()

    def result(self, timeout: float | None = None) -> list[Any]:
        """Every rank's return value, in rank order; of as many ranks as there were in the end.

        Raises:
            TimeoutError: The gang has not ended within `timeout` seconds; it goes on.
            GangError: It failed; where the failing rank raised an exception, that exception, caused by such an error.
            concurrent.futures.CancelledError: It was cancelled.
        """
        self._futures[0].result(timeout)
        return [future.result() for future in self._futures[: self._num_ranks]]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error that `result` would raise, or None."""
        self._futures[0].exception(timeout)
        futures = self._futures[: self._num_ranks]
        return next((error for future in futures if (error := future.exception()) is not None), None)

    def cancel(self) -> bool:
        """End all the ranks; False where the gang had ended before."""
        if self.done():
            return False
        self._supervisor.cancel()
        return True

    def _settle(self) -> None:
        try:
            self._settle_ended(self._supervisor.run())
        except BaseException as error:
            self._note_unfinished()
            is_cancelled = isinstance(error, GangCancelledError)
            cause = CancelledError(str(error)) if is_cancelled else from_user(raisable(error, "the gang's driver"))
            for future in self._futures:
                if not future.done():
                    future.set_exception(cause)
        finally:
            self._supervisor.received.drop_returned()

    def _settle_ended(self, results: Sequence[Any]) -> None:
        self._num_ranks = min(len(results), len(self._futures))
        if self._num_ranks < len(self._futures):
            self._settle_missing()
        # The last first: `result` waits for future 0 alone.
        for rank, result in reversed(list(enumerate(results[: self._num_ranks]))):
            try:
                returned = self._supervisor.received.load_returned(rank, result)
            except BaseException as error:  # whatever a user's class, or an extension that makes one, raises
                error.add_note(f"raised while the return value of rank {rank} was unpickled in the driver")
                self._futures[rank].set_exception(raisable(error, "unpickling a return value"))
            else:
                self._futures[rank].set_result(returned)
                del returned

    def _settle_missing(self) -> None:
        how = f"the gang ended with {self._num_ranks} of {len(self._futures)} ranks, as its min_workers allows"
        for rank, future in enumerate(self._futures[self._num_ranks :], self._num_ranks):
            text = f"{how}; there was no rank {rank}, since too few workers came, or were left"
            future.is_missing = True
            future.set_exception(GangStartError(text, rank=rank))


def _end(supervisor: Supervisor) -> bool:
    if supervisor.interrupt():
        return False
    supervisor.preempt("Ctrl-C", is_awaited=True)
    return True


class SettledFutures(GangFutures):
    """That of a rank which is this process: settled once it is made."""

    def __init__(self, received: ReceivedResults, call: Callable[[], Any]) -> None:
        future = GangFuture(received)
        self._num_ranks, self._futures = 1, [future]
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(raisable(error, "the function"))
