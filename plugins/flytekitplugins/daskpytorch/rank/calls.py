"""Serves the calls of a gang that stays, one after the other. Runs in a rank's main thread, until the gang closes."""

from __future__ import annotations

import ast
import contextlib
import gc
import queue
import sys
from collections.abc import Callable, Mapping
from typing import Any

from flytekitplugins.daskpytorch.context import StopSignal
from flytekitplugins.daskpytorch.protocol.failure import Failure
from flytekitplugins.daskpytorch.protocol.function import unpack_call, values
from flytekitplugins.daskpytorch.protocol.messages import CallEnded, CallOrder, Finish, Forget, NextCall
from flytekitplugins.daskpytorch.protocol.script import completed
from flytekitplugins.daskpytorch.rank import sources
from flytekitplugins.daskpytorch.rank.link import GangLink

CELL = "<cell of all ranks>"


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
            large = order.large
            data, *aside = self._link.large(large) if large is not None else [memoryview(order.call)]
            returned = completed(_unpacked(data, aside, self._present))
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


def _unpacked(data: memoryview, aside: list[memoryview], present: Mapping[str, Any]) -> Callable[[], Any]:
    try:
        return unpack_call(data, aside, present)
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


# ---- Cells of a notebook, run by calls of `cell`


def cell(source: str, kept: Mapping[str, Any]) -> str | None:
    main = vars(sys.modules["__main__"])
    sources.remember(CELL, source)
    tree = ast.parse(source, CELL)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    main.update(kept)
    try:
        exec(compile(tree, CELL, "exec"), main)  # noqa: S102 - the user's own cell
        value = eval(compile(ast.Expression(last.value), CELL, "eval"), main) if isinstance(last, ast.Expr) else None  # noqa: S307
        return None if value is None else repr(value)
    finally:
        for name, each in kept.items():
            if main.get(name) is each:  # else the value would stay here without its reference
                del main[name]
