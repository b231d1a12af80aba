"""Serves the calls of a gang that stays, one after the other. Runs in a rank's main thread, until the gang closes."""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import linecache
import queue
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from flytekitplugins.daskpytorch.context import StopSignal
from flytekitplugins.daskpytorch.protocol.code import place_code
from flytekitplugins.daskpytorch.protocol.failure import Failure
from flytekitplugins.daskpytorch.protocol.function import Call, unpack_call, values
from flytekitplugins.daskpytorch.protocol.messages import CallEnded, CallOrder, Finish, Forget, NextCall
from flytekitplugins.daskpytorch.protocol.script import ending_as_program
from flytekitplugins.daskpytorch.rank import sources
from flytekitplugins.daskpytorch.rank.interrupter import Interrupter
from flytekitplugins.daskpytorch.rank.link import GangLink

SHARED = (bool, int, float, str, bytes, tuple, type, ModuleType, FunctionType)
"""Types of values that Python or several names may share. No name is known to be bound to such a value by a call."""
CELL = "<cell of all ranks>"
"""File name of the cell in tracebacks."""


class Server:
    """Calls of one rank: orders that wait, and the values that the rank keeps.

    `serve` runs in the main thread. The thread that receives orders calls `put` and the methods of `interrupter`.
    """

    def __init__(
        self,
        link: GangLink,
        folder: Path,
        stop_signal: StopSignal,
        completed: Callable[[Any], Any],
        failure_of: Callable[[BaseException, int], Failure],
        ending_forks: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Prepare to serve calls.

        Args:
            link: Link to the driver.
            folder: Folder of this rank alone, for sources of later calls. Need not exist.
            stop_signal: The rank's signal to stop. After a call in which the signal has fired, the rank returns.
            completed: Runs a coroutine that a function has returned to its end.
            failure_of: Makes the report of an exception, of the call with this number.
            ending_forks: Context that ends each process that a call has forked.
        """
        self._link = link
        self._folder = folder
        self.interrupter = Interrupter(link)
        self._stop_signal = stop_signal
        self._completed = completed
        self._failure_of = failure_of
        self._ending_forks = ending_forks
        self._orders: queue.SimpleQueue[CallOrder] = queue.SimpleQueue()
        self._present: dict[str, Any] = {}
        """Content of `__main__` before the first call, which calls may not replace."""
        self._bound: set[str] = set()
        """Names of `__main__` that calls have bound to values that this rank keeps."""

    def put(self, order: CallOrder) -> None:
        """Queue an order for the main thread."""
        self._orders.put(order)

    def serve(self) -> None:
        """Run the gang's calls until the gang closes, or until a call ends after the rank's signal to stop."""
        self._present = dict(vars(sys.modules["__main__"]))
        while not isinstance(order := self._next(), Finish):
            if isinstance(order, Forget):
                self._forget(order.number)
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
            self._enter_code(order)  # also if the call was interrupted before its start: later calls need the sources
            with self.interrupter.interruptible(order.number), self._ending_forks():
                returned = self._call(order)
            value = self._take(order, returned)
        except BaseException as error:
            self.interrupter.leave()  # Ctrl-C may have come right at the end of the call
            failure = self._failure_of(error, order.number)
        if failure is not None:
            gc.collect()  # the traceback's frames hold tensors
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):  # no stream, or a closed one
                stream.flush()  # the output of a call comes before its end
        self._link.send(CallEnded(number=order.number, value=value, failure=failure))

    def _enter_code(self, order: NextCall) -> None:
        if order.code is not None:
            self._folder.mkdir(exist_ok=True)
            sources.import_first_from(place_code(order.code, self._folder))
            importlib.invalidate_caches()

    def _call(self, order: NextCall) -> Any:
        is_large = order.large is not None
        parts = self._link.large(order.number) if is_large else [memoryview(order.call)]
        call = self._unpacked(parts)
        with ending_as_program():
            returned = self._completed(call.function(*call.args, **call.kwargs))
            _wait_for_gpu()
            return returned
        return None  # the call has ended by `sys.exit()`

    def _unpacked(self, parts: Sequence[memoryview]) -> Call:
        """Unpickle a call. Note the names of `__main__` to which the pickle has bound values that this rank keeps.

        A notebook's function that uses a reference as a global binds the reference's name.
        """
        main = vars(sys.modules["__main__"])
        before = dict(main)
        call = unpack_call(parts[0], parts[1:], self._present)
        kept = {id(value) for value in values.values() if not isinstance(value, SHARED)}
        self._bound.update(name for name, value in main.items() if id(value) in kept and value is not before.get(name))
        return call

    def _forget(self, number: int) -> None:
        """Free a kept value, also where a call's pickle has bound the value to a name of `__main__`."""
        value, main = values.pop(number, None), vars(sys.modules["__main__"])
        for name in list(self._bound):
            if main.get(name, self) is value:
                self._bound.remove(name)
                del main[name]

    def _take(self, order: NextCall, returned: Any) -> bytes | None:
        """Keep the return value, or send it to the driver. Return the pickle that the report of the end carries."""
        if order.keeps:
            values[order.number], returned = returned, None
        return self._link.send_returned(returned)


def _wait_for_gpu() -> None:
    """Wait until this rank's GPU has done all work of the call, so that an error of the GPU belongs to the call."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


# ---- Cells of a notebook, run by calls of `cell`


def remember(source: str) -> None:
    """Have tracebacks of this process show the lines of a cell. `linecache` keeps the newest cell."""
    linecache.cache[CELL] = (len(source), None, source.splitlines(keepends=True), CELL)


def cell(source: str, kept: Mapping[str, Any]) -> str | None:
    """Run a cell in this rank's `__main__`, and return its last expression's value as text.

    Args:
        source: Python code of the cell.
        kept: Values that the rank keeps, by the name of their reference in the notebook. The cell sees them by name.

    Returns:
        The `repr` of the value. None if the cell does not end with an expression, or the value is None.
    """
    main = vars(sys.modules["__main__"])
    remember(source)
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
