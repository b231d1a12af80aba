"""Serves the calls of a gang that stays, one after the other. Runs in a rank's main thread, until the gang closes.

A call ends early by `KeyboardInterrupt`, at the same collective in each rank: a rank that leaves before a collective in
which another waits would end the gang. So all ranks first halt, or wait in a collective. Then each runs on until it has
entered the foremost rank's newest collective.

    Ask(HALT) ──▶ halt at the next line ──▶ Answer ──▶ EndCall(at) ──▶ run on ──▶ KeyboardInterrupt
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any

from flytekitplugins.daskpytorch.context import StopSignal
from flytekitplugins.daskpytorch.protocol.code import place_code
from flytekitplugins.daskpytorch.protocol.failure import Failure
from flytekitplugins.daskpytorch.protocol.function import unpack_call, values
from flytekitplugins.daskpytorch.protocol.messages import CallEnded, CallOrder, Finish, Forget, NextCall
from flytekitplugins.daskpytorch.protocol.script import ending_as_program
from flytekitplugins.daskpytorch.rank import liveness, process_group, sources
from flytekitplugins.daskpytorch.rank.link import GangLink

SHARED = (bool, int, float, str, bytes, tuple, type, ModuleType, FunctionType)
"""Types whose values Python or several names may share: no name is known to be bound by a call."""
CELL = "<cell of all ranks>"


class Server:
    """`serve` runs in the main thread, `put` and the methods of `interrupter` in the thread that receives orders."""

    def __init__(
        self,
        link: GangLink,
        folder: Path,
        stop_signal: StopSignal,
        completed: Callable[[Any], Any],
        failure_of: Callable[[BaseException], Failure],
        ending_forks: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._link = link
        self._folder = folder
        self.interrupter = Interrupter(link)
        self._stop_signal = stop_signal
        self._completed = completed
        self._failure_of = failure_of
        self._ending_forks = ending_forks
        self._orders: queue.SimpleQueue[CallOrder] = queue.SimpleQueue()
        self._present: dict[str, Any] = {}
        self._bound: set[str] = set()
        """Names of `__main__` that calls have bound to kept values."""

    def put(self, order: CallOrder) -> None:
        self._orders.put(order)

    def serve(self) -> None:
        """Run calls until the gang closes, or until one ends after the rank's signal to stop."""
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
            failure = self._failure_of(error)
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
        parts = self._link.large(order.large) if order.large is not None else [memoryview(order.call)]
        call = self._unpacked(parts)
        with ending_as_program():
            returned = self._completed(call())
            _wait_for_gpu()
            return returned
        return None  # the call has ended by `sys.exit()`

    def _unpacked(self, parts: Sequence[memoryview]) -> Callable[[], Any]:
        main = vars(sys.modules["__main__"])
        before = dict(main)
        call = unpack_call(parts[0], parts[1:], self._present)
        kept = {id(value) for value in values.values() if not isinstance(value, SHARED)}
        self._bound.update(name for name, value in main.items() if id(value) in kept and value is not before.get(name))
        return call

    def _forget(self, number: int) -> None:
        value, main = values.pop(number, None), vars(sys.modules["__main__"])
        for name in list(self._bound):
            if main.get(name, self) is value:
                self._bound.remove(name)
                del main[name]

    def _take(self, order: NextCall, returned: Any) -> bytes | None:
        if order.keeps:
            values[order.number], returned = returned, None
        return self._link.send_returned(returned)


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


# ---- The end of a call

RETRY_WAIT = 0.01
HALT_TIME = 0.3
"""Seconds to halt, before the main thread counts as waiting in a collective."""
MAX_HALT = 30.0
"""Seconds after which a halted main thread leaves the call without the driver's answer."""


class Interrupter:
    """Interrupts one rank's calls. `halt` and `leave_at` run in the receiving thread, all else in the main thread."""

    def __init__(self, link: GangLink) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._running: int | None = None
        self._last_ended = 0
        self._at: int | None = None
        self._counted: int | None = None
        self._has_halted, self._has_answer = threading.Event(), threading.Event()

    def halt(self, number: int) -> int:
        """Halt, or wait until the main thread waits in a collective.

        Returns the default group's collective after which the rank can leave the call. 0: unknown.
        """
        self._at = None
        self._has_answer.clear()
        self._has_halted.clear()
        with self._lock:
            self._last_ended = number
            is_running = self._running == number
        count = 0
        if is_running:
            self._signal(number)
            # A backward pass may enter several collectives before the main thread's next line.
            count = int(not self._has_halted.wait(HALT_TIME) and _is_in_backward())
        return newest + count if (newest := newest_collective()) else 0

    def leave_at(self, at: int) -> None:
        self._at = at
        self._has_answer.set()

    @contextlib.contextmanager
    def interruptible(self, number: int) -> Iterator[None]:
        signal.signal(signal.SIGINT, self._heed)
        with self._lock:
            self._running, is_ended = number, self._last_ended >= number
        try:
            if is_ended:
                self._halt(None)
            yield
        finally:
            self.leave()

    def leave(self) -> None:
        self._running = None
        if sys.gettrace() == self._trace:
            sys.settrace(None)

    def _signal(self, number: int) -> None:
        with self._lock:
            if self._running == number:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def _heed(self, _: int, frame: FrameType | None) -> None:
        """Handle SIGINT in a call, but never in the middle of a message to the agent.

        A SIGINT without the driver's order is a debugger's or the user's own, and raises `KeyboardInterrupt` at once.
        """
        if (number := self._running) is None:
            return
        is_ordered = self._last_ended >= number
        if is_ordered and self._has_halted.is_set():
            return
        if self._link.is_sending:
            again = threading.Timer(RETRY_WAIT, self._signal, (number,))
            again.daemon = True
            again.start()
        elif is_ordered:
            self._halt(frame)
        else:
            raise KeyboardInterrupt

    def _halt(self, frame: FrameType | None) -> None:
        self._has_halted.set()
        self._has_answer.wait(MAX_HALT)
        self._counted = None
        if self._is_there() or sys.gettrace() is not None:  # a debugger or a coverage tool traces already
            raise KeyboardInterrupt
        while frame is not None:
            frame.f_trace = self._trace
            frame = frame.f_back
        sys.settrace(self._trace)

    def _trace(self, *_: object) -> Any:
        if self._running is not None and self._is_there() and not self._link.is_sending:
            sys.settrace(None)
            raise KeyboardInterrupt
        return self._trace

    def _is_there(self) -> bool:
        if self._at is None:
            return True
        if (counted := process_group.num_collectives()) == self._counted:  # a look at each line would be slow
            return False
        self._counted = counted
        return not 0 < newest_collective() < self._at


def _is_in_backward() -> bool:
    _, _, frames = liveness.stacks().rpartition("(most recent call first):")  # of the main thread
    return "torch/autograd/" in frames.strip().partition("\n")[0]


def newest_collective() -> int:
    """Return the number of the default group's newest collective, 0 if unknown.

    The group's own counter also counts messages between two ranks, which need not be equal in all ranks.
    """
    recalled = liveness.recall() if process_group.are_numbers_comparable() else None
    return recalled.newest_of_all if recalled is not None else 0
