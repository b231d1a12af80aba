"""Serves the calls of a gang that stays, one after the other. Runs in a rank's main thread, until the gang closes."""

from __future__ import annotations

import contextlib
import gc
import queue
import sys
from collections.abc import Callable, Mapping
from typing import IO, Any

from flytekitplugins.daskpytorch.context import StopSignal
from flytekitplugins.daskpytorch.protocol.failure import Failure
from flytekitplugins.daskpytorch.protocol.function import unpack_call, values
from flytekitplugins.daskpytorch.protocol.messages import CallEnded, CallOrder, Finish, Forget, NextCall
from flytekitplugins.daskpytorch.protocol.script import completed
from flytekitplugins.daskpytorch.rank.link import GangLink


class Server:
    """`serve` runs in the main thread, `put` in the thread that receives orders."""

    def __init__(
        self,
        link: GangLink,
        stop_signal: StopSignal,
        failure_of: Callable[[BaseException], Failure],
    ) -> None:
        self._link = link
        self._stop_signal = stop_signal
        self._failure_of = failure_of
        self._orders: queue.SimpleQueue[CallOrder] = queue.SimpleQueue()
        self._present: dict[str, Any] = {}

    def put(self, order: CallOrder) -> None:
        self._orders.put(order)

    def serve(self) -> None:
        """Run calls until the gang closes, or until one ends after the rank's signal to stop."""
        self._present = dict(vars(sys.modules["__main__"]))
        while not isinstance(order := self._next(), Finish):
            if isinstance(order, Forget):
                values.pop(order.number, None)
                continue
            self._run(order)
            if self._stop_signal.has_fired:
                return

    def _next(self) -> CallOrder:
        with self._link.ledger.spending("waiting"):
            return self._orders.get()

    def _run(self, order: NextCall) -> None:
        self._link.progress.move()  # the time before was no hang
        self._link.progress.step = None
        value, failure = None, None
        try:
            with self._link.opened(order.call) as data:
                call = _unpacked(data, self._present)
            returned = completed(call)
            _wait_for_gpu()
            if order.keeps:
                values[order.number], returned = returned, None
            value = self._link.send_returned(returned)
        except BaseException as error:
            failure = self._failure_of(error)
        if failure is not None:
            gc.collect()  # the traceback's frames hold tensors
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):  # no stream, or a closed one
                stream.flush()  # the output of a call comes before its end
        self._link.send(CallEnded(number=order.number, value=value, failure=failure))


def _unpacked(data: IO[bytes], present: Mapping[str, Any]) -> Callable[[], Any]:
    try:
        return unpack_call(data, present)
    except ModuleNotFoundError as error:
        error.add_note(
            "Ranks have the modules that were imported when their gang began: import this one, and begin anew."
        )
        raise


def _wait_for_gpu() -> None:
    """An error of the GPU must belong to the call that has caused it."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
