"""Futures of one call of a gang that stays. Held by the caller, in the driver."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING

from flytekitplugins.daskpytorch.display.run_state import Logged, RunState
from flytekitplugins.daskpytorch.driver.futures import GangFuture, GangFutures
from flytekitplugins.daskpytorch.protocol.failure import raisable

if TYPE_CHECKING:
    import threading

    from flytekitplugins.daskpytorch.driver.parts.calls import Outcome
    from flytekitplugins.daskpytorch.driver.received import ReceivedResults

_logger = logging.getLogger(__name__)


class CallFutures(Logged, GangFutures):
    """Futures of one call of a gang that stays, one per rank, in the order of the ranks.

    `records`, `metrics` and `step` have what rank 0 logs in the call.
    """

    def __init__(
        self,
        received: ReceivedResults,
        num_ranks: int,
        settler: threading.Thread,
        end: Callable[[], object],
        keep: object,
    ) -> None:
        """Prepare the futures of a call.

        Args:
            received: The gang's received results.
            num_ranks: Number of ranks.
            settler: Thread that settles the futures.
            end: Ends the call, by `cancel` or at Ctrl-C.
            keep: Gang, function and arguments, which are referenced until the call's end.
        """
        self.run_state = self._run_state = RunState()
        self._end = end
        self._keep: object = keep
        self._num_ranks = num_ranks
        self._futures = [GangFuture(received, end, settler) for _ in range(num_ranks)]
        for future in self._futures:
            future.set_running_or_notify_cancel()

    def settle(self, outcome: Outcome) -> None:
        """Settle all futures. Future 0 is the last, since `result` waits for this future alone."""
        self._cause, self._keep = outcome.cause, None
        for rank, future in reversed(list(enumerate(self._futures))):
            with _settled(future):
                if outcome.is_interrupted:
                    future.set_exception(CancelledError("the call was cancelled"))
                elif rank in outcome.errors:
                    future.set_exception(outcome.errors[rank])
                else:
                    future.load(rank, outcome.values[rank])

    def fail(self, error: BaseException) -> None:
        """Settle all futures with the error that has ended the gang."""
        self._keep = None
        for future in reversed(self._futures):
            with _settled(future):
                future.set_exception(error)


@contextlib.contextmanager
def _settled(future: GangFuture) -> Iterator[None]:
    """Settle a future in the block. An error of the block is logged, and fails the future if that is not settled yet.

    `concurrent.futures` lets a `SystemExit` or `KeyboardInterrupt` of a user's callback through.
    """
    try:
        yield
    except BaseException as error:
        _logger.exception("the future of a call, or a callback of the future, has raised an error")
        if not future.done():
            future.set_exception(raisable(error, "settling a future"))
