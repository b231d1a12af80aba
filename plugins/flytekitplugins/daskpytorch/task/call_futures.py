"""Futures of one call of a gang that stays. Held by the caller, in the driver."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

from flytekitplugins.daskpytorch.display.logged import Log, Logged
from flytekitplugins.daskpytorch.driver.futures import Futures, GangFuture
from flytekitplugins.daskpytorch.process.system import optional
from flytekitplugins.daskpytorch.protocol.failure import raisable

if TYPE_CHECKING:
    from flytekitplugins.daskpytorch.driver.calls import Outcome
    from flytekitplugins.daskpytorch.driver.received import ReceivedResults


class CallFutures(Logged, Futures[GangFuture]):
    """Futures of one call of a gang that stays, one per rank, in the order of the ranks.

    `records`, `metrics` and `step` have what rank 0 logs in the call.
    """

    def __init__(
        self,
        received: ReceivedResults,
        num_ranks: int,
        end: Callable[[], bool],
        keep: object,
        conclude: Callable[[], object] | None,
    ) -> None:
        """Prepare the futures of a call.

        Args:
            received: The gang's received results.
            num_ranks: Number of ranks.
            end: Ends the call. Returns False if a rank's debugger gets the Ctrl-C.
            keep: Gang, function and arguments, which are referenced until the call's end.
            conclude: Ends the call's table in a notebook. Called before the futures are settled. None: no table.
        """
        self.log = self._log = Log()
        self._end = end
        self._keep: object = keep
        self._conclude = conclude or (lambda: None)
        self._cause: int | None = None
        self._futures = [GangFuture(received, end) for _ in range(num_ranks)]
        for future in self._futures:
            future.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> list[Any]:
        """Return the return values of all ranks, in rank order.

        Args:
            timeout: Maximum number of seconds to wait. None: no limit.

        Raises:
            TimeoutError: The call has not ended within `timeout` seconds. The call goes on.
            GangError: The gang failed. If a rank raised an exception, that exception is raised instead, with the
                `GangError` as `__cause__`.
            concurrent.futures.CancelledError: The call was cancelled.
        """
        if (error := self.exception(timeout)) is not None:
            raise error
        return [future.result() for future in self._futures]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the call's end, and return the error that `result` would raise. None after a success."""
        self._futures[0].exception(timeout)
        if self._cause is not None:
            return self._futures[self._cause].exception()
        return next((error for future in self._futures if (error := future.exception()) is not None), None)

    def cancel(self) -> bool:
        """End the call: by a `KeyboardInterrupt` in each rank if the call runs. Return False if it had ended."""
        return not self.done() and self._end()

    def settle(self, outcome: Outcome) -> None:
        """Settle all futures. Future 0 is the last, since `result` waits for this future alone."""
        with optional("ending the notebook's table of the call"):
            self._conclude()
        self._cause, self._keep = outcome.cause, None
        for rank, future in reversed(list(enumerate(self._futures))):
            if outcome.is_interrupted:
                future.set_exception(CancelledError("the call was cancelled"))
            elif rank in outcome.errors:
                future.set_exception(outcome.errors[rank])
            else:
                _load(future, rank, outcome.values[rank])

    def fail(self, error: BaseException) -> None:
        """Settle all futures with the error that has ended the gang."""
        with optional("ending the notebook's table of the call"):
            self._conclude()
        self._keep = None
        for future in reversed(self._futures):
            future.set_exception(error)


def _load(future: GangFuture, rank: int, load: Callable[[], Any]) -> None:
    try:
        value = load()
    except BaseException as error:  # any error of a user's class or extension
        error.add_note(f"raised while the return value of rank {rank} was unpickled in the driver")
        future.set_exception(raisable(error, "unpickling a return value"))
    else:
        future.set_result(value)
