"""Futures that the caller of a gang holds, one per rank. Runs in the driver."""

import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar, overload

from flytekitplugins.daskpytorch.driver.blame import from_user
from flytekitplugins.daskpytorch.driver.received import ReceivedResults
from flytekitplugins.daskpytorch.driver.supervisor import Supervisor
from flytekitplugins.daskpytorch.errors import GangCancelledError, GangStartError
from flytekitplugins.daskpytorch.process.ending import deferred
from flytekitplugins.daskpytorch.protocol.failure import raisable

F = TypeVar("F", bound=Future[Any])
TURN = 1.0
"""Seconds between two wake-ups of a waiting thread, at which Python runs the handlers of pending signals."""


class GangFuture(Future[Any]):
    def __init__(
        self,
        received: ReceivedResults,
        end: Callable[[], object] | None = None,
        settler: threading.Thread | None = None,
    ) -> None:
        super().__init__()
        self._settler = settler
        self.received = received
        self._end = end
        """Ends the gang at Ctrl-C while a thread waits for this future. None: Ctrl-C is raised at once."""
        self.is_missing = False
        """The gang succeeded without this rank, as `min_workers` allows."""

    def result(self, timeout: float | None = None) -> Any:
        """Return the rank's return value, or raise its error, or `TimeoutError` after `timeout` seconds."""
        __tracebackhide__ = True  # notebooks and pytest leave the frame out of tracebacks
        self._wait(timeout)
        return super().result(None if timeout is None else 0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the rank's error, or None after a success, or raise `TimeoutError` after `timeout` seconds."""
        __tracebackhide__ = True
        self._wait(timeout)
        return super().exception(None if timeout is None else 0)

    def load(self, load: Callable[[], Any]) -> None:
        try:
            value = load()
        except BaseException as error:  # any error of a user's class or extension
            self.set_exception(raisable(error, "unpickling a return value"))
        else:
            self.set_result(value)

    def _wait(self, timeout: float | None) -> None:
        """Wait in turns, so that Python runs signal handlers in time.

        Another thread, or a suspended process, may receive the signal, and Python runs the handler only after the main
        thread wakes: a task would miss a SIGTERM.
        """
        __tracebackhide__ = True
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        if self.done():
            return
        refuse_wait_in(self._settler)
        with deferred(self._end) as is_ending:
            while not self.done() and (is_ending() or time.monotonic() < deadline):
                with contextlib.suppress(TimeoutError):
                    super().exception(max(0.0, TURN if is_ending() else min(TURN, deadline - time.monotonic())))


def refuse_wait_in(settler: threading.Thread | None) -> None:
    """Raise RuntimeError in a callback of a future that this thread settles: it would wait for itself."""
    if threading.current_thread() is settler:
        raise RuntimeError(
            "a callback of a call's future waits for its gang, and would wait for ever: callbacks run in the thread "
            "that settles the gang's futures. Wait in the thread that makes the calls, or in one of your own"
        )


class Futures(Sequence[F]):
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
        return all(future.done() for future in self._futures)


class GangFutures(Futures[GangFuture]):
    """Futures of a running gang, one per rank, in the order of the ranks. All are settled when the gang ends.

    A gang may end with fewer workers than asked for, if `min_workers` allows. Futures of missing ranks then raise a
    `GangStartError`, and `result` returns the other ranks' results.
    """

    _cause: int | None = None
    """Rank whose error `result` raises. None: the first with an error."""

    def __init__(
        self,
        supervisor: Supervisor,
        world_size: int,
        note_end: Callable[[BaseException | None], object] = lambda _: None,
    ) -> None:
        self._supervisor = supervisor
        self._cancel: Callable[[], object] = supervisor.cancel
        self._note_end = note_end
        self._make_futures(supervisor, world_size)
        self.thread = threading.Thread(target=self._settle, name="daskpytorch-gang", daemon=True)
        self.thread.start()

    def _make_futures(self, supervisor: Supervisor, num_ranks: int, settler: threading.Thread | None = None) -> None:
        self._num_ranks = num_ranks
        end = functools.partial(supervisor.preempt, "Ctrl-C", is_awaited=True)
        self._futures = [GangFuture(supervisor.received, end, settler) for _ in range(num_ranks)]
        for future in self._futures:
            future.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> list[Any]:
        """Return the return values of all ranks, in rank order.

        Raise `TimeoutError` after `timeout` seconds: the gang goes on.

        Raises a rank's own exception, with the `GangError` as `__cause__`, a `GangError` of the gang, or
        `CancelledError` of `concurrent.futures`.
        """
        __tracebackhide__ = True
        self._futures[0].exception(timeout)
        if self._cause is not None:
            self._futures[self._cause].result()
        return [future.result() for future in self._futures[: self._num_ranks]]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the gang's end, and return the error that `result` would raise."""
        __tracebackhide__ = True
        self._futures[0].exception(timeout)
        if self._cause is not None:
            return self._futures[self._cause].exception()
        futures = self._futures[: self._num_ranks]
        return next((error for future in futures if (error := future.exception()) is not None), None)

    def cancel(self) -> bool:
        """End the gang and all its ranks. Return False if it had already ended."""
        if self.done():
            return False
        self._cancel()
        return True

    def _settle(self) -> None:
        try:
            self._settle_ended(self._run())
        except BaseException as error:
            is_cancelled = isinstance(error, GangCancelledError)
            cause = CancelledError(str(error)) if is_cancelled else from_user(raisable(error, "the gang's driver"))
            for future in self._futures:
                if not future.done():
                    future.set_exception(cause)
        finally:
            self._supervisor.received.drop_returned()

    def _run(self) -> list[Any]:
        try:
            results = self._supervisor.run()
        except BaseException as error:
            self._note_end(error)
            raise
        self._note_end(None)
        return results

    def _settle_ended(self, results: Sequence[Any]) -> None:
        self._num_ranks = min(len(results), len(self._futures))
        if self._num_ranks < len(self._futures):
            self._settle_missing()
        # Future 0 is settled last: `result` waits for this future alone.
        for rank, result in reversed(list(enumerate(results[: self._num_ranks]))):
            self._futures[rank].load(self._supervisor.received.take_returned(rank, result))

    def _settle_missing(self) -> None:
        how = f"the gang ended with {self._num_ranks} of {len(self._futures)} ranks, as its min_workers allows"
        for rank, future in enumerate(self._futures[self._num_ranks :], self._num_ranks):
            text = f"{how}; there was no rank {rank}, since too few workers came, or were left"
            future.is_missing = True
            future.set_exception(GangStartError(text, rank=rank))
