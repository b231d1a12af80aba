"""A gang that stays, whose caller makes call after call on its live ranks. Runs in the driver.

StayingGang.call ──▶ driver.parts.calls.Calls (gang's thread) ──▶ ranks ──▶ CallFutures, settled in the gang's thread
"""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from flytekitplugins.daskpytorch.display.run_state import Logged, RunState
from flytekitplugins.daskpytorch.driver.futures import TURN, GangFuture, GangFutures, refuse_wait_in
from flytekitplugins.daskpytorch.driver.parts.calls import Calls, Outcome, StayingCall
from flytekitplugins.daskpytorch.driver.request import packed
from flytekitplugins.daskpytorch.errors import GangError
from flytekitplugins.daskpytorch.process.folders import state_of
from flytekitplugins.daskpytorch.process.signals import deferred, is_interactive
from flytekitplugins.daskpytorch.process.streams import say
from flytekitplugins.daskpytorch.protocol import journal
from flytekitplugins.daskpytorch.protocol.code import pack_code
from flytekitplugins.daskpytorch.protocol.failure import raisable
from flytekitplugins.daskpytorch.protocol.function import check_arguments, check_function, kept_value, name_of
from flytekitplugins.daskpytorch.protocol.messages import Forget
from flytekitplugins.daskpytorch.protocol.observer import Observer
from flytekitplugins.daskpytorch.protocol.script import run_module, run_script
from flytekitplugins.daskpytorch.rank.calls import CELL, cell
from flytekitplugins.daskpytorch.rank.sources import remember
from flytekitplugins.daskpytorch.task.run import Run, RunFutures

if TYPE_CHECKING:
    from types import TracebackType

    from flytekitplugins.daskpytorch.driver.received import ReceivedResults
    from flytekitplugins.daskpytorch.driver.request import Request
    from flytekitplugins.daskpytorch.protocol.code import Code
    from flytekitplugins.daskpytorch.protocol.host import AgentLauncher

_logger = logging.getLogger(__name__)


class KeptValues:
    """Reference to the values that the ranks of one gang keep, one in each. `StayingGang.keep` returns it.

    As an argument of a later call, also inside lists, dicts and closures, the reference becomes each rank's own value.
    The values are freed with the reference.
    """

    def __init__(self, gang: StayingGang, number: int, name: str, forget: Callable[[Forget], object]) -> None:
        self._gang = gang
        self._number = number
        self._name = name
        weakref.finalize(self, forget, Forget(number)).atexit = False

    def __repr__(self) -> str:
        return f"<what {self._name} has returned in each rank>"

    def is_in(self, gang: StayingGang) -> bool:
        return gang is self._gang

    def __reduce__(self) -> tuple[Callable[[int], Any], tuple[int]]:
        if _packing.get() is not self._gang:
            raise TypeError(
                f"{self!r} stands for values in the ranks of one gang: pass it to gang.call or gang.keep of that gang"
            )
        return kept_value, (self._number,)


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
        self.run_state = self._run_state = RunState()
        self._end = end
        self._keep: object = keep
        self._num_ranks = num_ranks
        self._futures = [GangFuture(received, end, settler) for _ in range(num_ranks)]
        for future in self._futures:
            future.set_running_or_notify_cancel()

    def settle(self, outcome: Outcome) -> None:
        self._cause, self._keep = outcome.cause, None
        for rank, future in reversed(list(enumerate(self._futures))):
            with _settled(future):
                if outcome.end is not None:
                    future.set_exception(outcome.end)
                elif rank in outcome.errors:
                    future.set_exception(outcome.errors[rank])
                else:
                    future.load(rank, outcome.values[rank])


@dataclass(kw_only=True, eq=False)
class _Pending(Observer):
    """Calls of one gang that have not ended. Holds no reference to the gang's object."""

    calls: Calls = field(default_factory=Calls)
    lock: threading.Lock = field(default_factory=threading.Lock)
    futures: dict[int, tuple[CallFutures, StayingCall]] = field(default_factory=dict)
    num_ranks: int = 0
    has_formed: threading.Event = field(default_factory=threading.Event)
    is_closed: bool = False
    end: BaseException | None = None

    def on_event(self, event: journal.Event) -> None:
        match event:
            case journal.Placed(shape=shape):
                self.num_ranks = shape.world_size  # `min_workers` may have made it smaller
            case journal.Formed():
                self.has_formed.set()
            case journal.Logged():
                if (call := self.calls.current) is not None and call.number in self.futures:
                    self.futures[call.number][0].run_state.on_event(event)

    def settle(self, number: int, outcome: Outcome) -> None:
        with self.lock:
            futures, _ = self.futures.pop(number)
        futures.settle(outcome)

    def note_end(self, error: BaseException | None) -> None:
        """Fail all calls that have not ended. `error` is None if the gang was closed."""
        with self.lock:
            self.end = error = error or CancelledError("the gang was closed")
        for _, call in list(self.futures.values()):
            call.finish(Outcome(end=error))
        self.has_formed.set()


class StayingGang:
    """Gang whose ranks stay from call to call, with their process group, modules and kept values.

    `dispatch.gang` returns it. Leave its `with` block, or call `close`, to end the ranks.
    """

    def __init__(self, run: Run, request: Request, launcher: AgentLauncher, num_ranks: int) -> None:
        self._pending = pending = _Pending()
        self._calls = pending.calls
        self._numbers = itertools.count(1)
        self._settings = request.settings
        self._code = pack_code()
        self._num_modules = len(sys.modules)
        asked = replace(request, calls=pending.calls, observers=[*request.observers, pending])
        self._supervisor = run.supervised(asked, launcher)
        self._shown = run.shown
        self._futures = RunFutures(run, self._supervisor, num_ranks)
        self._futures[0].add_done_callback(lambda future: pending.note_end(future.exception()))
        weakref.finalize(self, self._supervisor.cancel).atexit = False
        self._await_start()
        _newest.append(weakref.ref(self))

    @classmethod
    def newest(cls) -> StayingGang | None:
        _newest[:] = [ref for ref in _newest if (gang := ref()) is not None and gang.is_open]
        return _newest[-1]() if _newest else None

    @property
    def is_open(self) -> bool:
        """True if the gang is neither closed nor ended."""
        return self._pending.end is None and not self._pending.is_closed

    def _await_start(self) -> None:
        with deferred(self._supervisor.cancel):
            while not self._pending.has_formed.wait(TURN):
                pass
        if self._pending.end is not None:
            raise self._pending.end

    def __repr__(self) -> str:
        state = "ended" if self._pending.end is not None else f"{len(self._pending.futures)} calls to do"
        return f"<gang of {self._pending.num_ranks} ranks: {state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the calls so far, then end the ranks. After an exception in the block, end the ranks at once."""
        try:
            if kind is None:
                for futures, _ in list(self._pending.futures.values()):
                    futures.exception()
        finally:
            self.close()

    def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> CallFutures:
        """Call a function in every rank, after all earlier calls of this gang.

        An exception of the function is that call's, and the gang goes on, unless a rank waits for another that has left
        the call. Ctrl-C during a wait for the result raises `KeyboardInterrupt` in each rank, too. The gang goes on if
        all ranks leave the call together within 10 seconds, and else ends.

        Args:
            function: Function that each rank calls. Definitions of `__main__` and of notebooks travel with each call.
            *args: Picklable positional arguments, and references from `keep`.
            **kwargs: Keyword arguments of the function.

        Returns:
            Sequence with a future per rank, in rank order. The sequence also has `result`, `exception` and `cancel`,
            and `records`, `metrics` and `step` of rank 0's log.

        Raises:
            TypeError: The function or an argument cannot be pickled, or calling the function would not train.
            GangError: The gang has ended. The error says why, and how to begin anew.
        """
        __tracebackhide__ = True
        return self._ask(function, args, kwargs)[0]

    def keep(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> KeptValues:
        """Call a function in every rank, and keep each rank's return value there. Return a reference to the values.

        The call waits until all ranks have returned. The values are freed when the reference is garbage-collected.

        Args:
            function: Function that each rank calls, as for `call`.
            *args: Positional arguments, as for `call`.
            **kwargs: Keyword arguments of the function.

        Raises:
            GangError: The gang has ended or failed. If a rank raised an exception, that exception is raised instead.
            TypeError: `call` would refuse the function or an argument.
        """
        __tracebackhide__ = True
        refuse_wait_in(self._futures.thread)
        futures, number = self._ask(function, args, kwargs, keeps=True)
        kept = KeptValues(self, number, name_of(function), self._calls.ask)  # frees the values if a rank has failed
        futures.result()
        return kept

    def output_here(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which a notebook shows the ranks' output in the cell that runs now."""
        return self._shown.output_here() if self._shown is not None else contextlib.nullcontext()

    def close(self) -> None:
        """End all ranks. Calls that have not ended are cancelled."""
        refuse_wait_in(self._futures.thread)
        with self._pending.lock:
            self._pending.is_closed = True
            has_calls = bool(self._pending.futures)
        if has_calls:
            self._supervisor.cancel()
        else:
            self._calls.close()
        self._futures.exception()

    def _ask(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, keeps: bool = False
    ) -> tuple[CallFutures, int]:
        __tracebackhide__ = True
        if function in (run_script, run_module):
            raise TypeError(f"{name_of(function)} begins a program in ranks of its own: pass it to dispatch.run")
        check_function(function)
        if self._settings.on_error == "hold":  # a rank would wait in a debugger, for an error that is the caller's
            check_arguments(function, *args, **kwargs)
        if not self.is_open:
            raise self._error_if_over()
        token = _packing.set(self)
        try:
            call, large = packed(function, args, kwargs)
        finally:
            _packing.reset(token)
        code = self._new_code()
        with self._pending.lock:
            if self.is_open:
                number = next(self._numbers)
                settle = functools.partial(self._pending.settle, number)
                name = name_of(function)
                asked = StayingCall(
                    number=number, name=name, call=call, code=code, large=large, keeps=keeps, settle=settle
                )
                return self._queue(asked, (self, function, args, kwargs)), number
        if large is not None:
            large.close()
        raise self._error_if_over()

    def _queue(self, asked: StayingCall, keep: object) -> CallFutures:
        pending = self._pending
        futures = CallFutures(
            self._supervisor.received,
            pending.num_ranks,
            self._futures.thread,
            end=functools.partial(self._calls.interrupt, asked),
            keep=keep,
        )
        pending.futures[asked.number] = (futures, asked)
        self._calls.ask(asked)
        return futures

    def _new_code(self) -> Code | None:
        files = self._code.originals.values() if is_interactive() else ()  # a script is not edited while it runs
        changed = [path for path, state in files if state_of(Path(path)) != state]
        for path in changed:
            say(
                f"{path} has changed, and ranks that have imported it keep the old code. Begin a new gang, "
                "or have the ranks reload the module: gang.call(importlib.reload, module)"
            )
        known, self._num_modules = self._num_modules, len(sys.modules)
        if not changed and known == self._num_modules:
            return None
        self._code = pack_code()
        return self._code

    def _error_if_over(self) -> GangError:
        error = self._pending.end
        if self._pending.is_closed or error is None:
            text = "this gang is closed, and its ranks have ended: begin a new one by dispatch.gang(...)"
            return GangError(text, kind="closed")
        cause = error.__cause__ if isinstance(error.__cause__, GangError) else error
        why = str(cause).partition("\n")[0]
        text = (
            f"this gang has ended, and what its ranks kept is gone: {why}. Begin a new gang by dispatch.gang(...), and "
            "call keep again."
        )
        if self._settings.checkpoint_uri:
            text += " It goes on from the newest checkpoint: current_rank().checkpoint.load()."
        over = GangError(text, kind=getattr(cause, "kind", None))
        over.__cause__ = error
        return over


@contextlib.contextmanager
def _settled(future: GangFuture) -> Iterator[None]:
    """Settle a future in the block.

    An error of the block is logged, and fails an unsettled future. `concurrent.futures` lets a `SystemExit` or
    `KeyboardInterrupt` of a user's callback through.
    """
    try:
        yield
    except BaseException as error:
        _logger.exception("the future of a call, or a callback of the future, has raised an error")
        if not future.done():
            future.set_exception(raisable(error, "settling a future"))


# ---- The magic `%%ranks`


def load_magic(shell: Any) -> None:
    def ranks(line: str, source: str) -> None:
        """Run a cell in every rank of the newest gang, and print the last expression's value of each rank.

        A semicolon behind the expression keeps the values from being printed, as in any cell.
        """
        __tracebackhide__ = True
        if line.strip():
            raise ValueError(f"%%ranks {line}: takes no words behind it. The cell runs in every rank")
        ast.parse(source)  # a syntax error needs no rank
        if (gang := StayingGang.newest()) is None:
            raise RuntimeError("%%ranks needs a gang that stays: begin one by gang = dispatch.gang(...)")
        remember(CELL, source)
        with gang.output_here():
            values = gang.call(cell, source, kept_of(gang, shell.user_ns)).result()
        is_quiet = shell.displayhook.semicolon_at_end_of_expression(source)
        for rank, value in enumerate(values):
            if value is not None and not is_quiet:
                print(f"[rank {rank}] {value}")

    shell.register_magic_function(ranks, "cell", "ranks")


def kept_of(gang: StayingGang, names: dict[str, Any]) -> dict[str, KeptValues]:
    return {name: value for name, value in names.items() if isinstance(value, KeptValues) and value.is_in(gang)}


_newest: list[weakref.ref[StayingGang]] = []
_packing: ContextVar[StayingGang | None] = ContextVar("_packing", default=None)
