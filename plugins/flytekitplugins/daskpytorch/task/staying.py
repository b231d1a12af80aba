"""A gang that stays, whose caller makes call after call on its live ranks. Runs in the driver.

StayingGang.call ──▶ driver.parts.calls.Calls (gang's thread) ──▶ ranks ──▶ CallFutures, settled in the gang's thread
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from flytekitplugins.daskpytorch.display.run_state import Logged, RunState
from flytekitplugins.daskpytorch.driver.futures import TURN, GangFutures, refuse_wait_in
from flytekitplugins.daskpytorch.driver.parts.calls import Calls, Outcome, StayingCall
from flytekitplugins.daskpytorch.errors import GangError
from flytekitplugins.daskpytorch.process.ending import deferred
from flytekitplugins.daskpytorch.protocol import journal
from flytekitplugins.daskpytorch.protocol.code import pack_code
from flytekitplugins.daskpytorch.protocol.function import check_call, kept_value, name_of, pack_call
from flytekitplugins.daskpytorch.protocol.script import run_module, run_script
from flytekitplugins.daskpytorch.task.run import Run, RunFutures

if TYPE_CHECKING:
    from types import TracebackType

    from flytekitplugins.daskpytorch.driver.request import Request
    from flytekitplugins.daskpytorch.driver.supervisor import Supervisor
    from flytekitplugins.daskpytorch.protocol.host import AgentLauncher
    from flytekitplugins.daskpytorch.records import LogRecord


class KeptValues:
    """Reference to the values that the ranks of one gang keep, one in each. `StayingGang.keep` returns it.

    As an argument of a later call, also inside lists, dicts and closures, the reference becomes each rank's own value.
    The values are freed with the reference.
    """

    def __init__(self, gang: StayingGang, number: int, name: str, forget: Callable[[int], object]) -> None:
        self.gang = gang
        self._number = number
        self._name = name
        weakref.finalize(self, forget, number).atexit = False

    def __repr__(self) -> str:
        return f"<what {self._name} has returned in each rank>"

    def __reduce__(self) -> tuple[Callable[[int], Any], tuple[int]]:
        return kept_value, (self._number,)


class CallFutures(Logged, GangFutures):
    """Futures of one call of a gang that stays, one per rank, in the order of the ranks.

    `records`, `metrics` and `step` have what rank 0 logs in the call.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        num_ranks: int,
        settler: threading.Thread,
        cancel: Callable[[], object],
        keep: object,
    ) -> None:
        self.run_state = self._run_state = RunState()
        self._cancel = cancel
        self._keep: object = keep
        self._make_futures(supervisor, num_ranks, settler)

    def log(self, record: LogRecord) -> None:
        self.run_state.on_event(journal.Logged(record=record))

    def settle(self, outcome: Outcome) -> None:
        self._cause, self._keep = outcome.cause, None
        for rank, future in reversed(list(enumerate(self._futures))):
            with contextlib.suppress(SystemExit, KeyboardInterrupt):  # `concurrent.futures` lets a callback's through
                if (error := outcome.end or outcome.errors.get(rank)) is not None:
                    future.set_exception(error)
                else:
                    future.load(outcome.values[rank])


class StayingGang:
    """Gang whose ranks stay from call to call, with their process group, modules and kept values.

    `dispatch.gang` returns it. Leave its `with` block, or call `close`, to end the ranks.
    """

    def __init__(self, run: Run, request: Request, launcher: AgentLauncher, num_ranks: int) -> None:
        self._calls = calls = Calls()
        self._settings = request.settings
        self._supervisor = run.supervised(replace(request, calls=calls, code=pack_code()), launcher)
        self._futures = RunFutures(run, self._supervisor, num_ranks)
        self._futures[0].add_done_callback(lambda future: calls.note_end(future.exception()))
        weakref.finalize(self, self._supervisor.cancel).atexit = False
        with deferred(self._supervisor.cancel):
            while not calls.has_formed.wait(TURN):
                pass
        if calls.end is not None:
            raise calls.end

    def __repr__(self) -> str:
        state = "ended" if self._calls.end is not None else f"{len(self._calls.open)} calls to do"
        return f"<gang of {self._calls.num_ranks} ranks: {state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the calls so far, then end the ranks. After an exception in the block, end the ranks at once."""
        self._finish(cancels=kind is not None)

    def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> CallFutures:
        """Call a function in every rank, after all earlier calls of this gang.

        An exception of the function is that call's, and the gang goes on, unless a rank waits for another that has left
        the call. Ctrl-C during a wait for the result ends the gang, as does `cancel` of a call that has begun.

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
        kept = KeptValues(self, number, name_of(function), self._calls.forget)  # frees the values if a rank has failed
        futures.result()
        return kept

    def close(self) -> None:
        """End all ranks. Calls that have not ended are cancelled."""
        self._finish(cancels=True)

    def _finish(self, *, cancels: bool) -> None:
        refuse_wait_in(self._futures.thread)
        self._calls.finish(cancels=cancels)
        self._futures.exception()

    def _ask(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, keeps: bool = False
    ) -> tuple[CallFutures, int]:
        __tracebackhide__ = True
        if function in (run_script, run_module):
            raise TypeError(f"{name_of(function)} begins a program in ranks of its own: pass it to dispatch.run")
        check_call(function, *args, **kwargs)
        call = pack_call(function, args, kwargs)
        number, calls = next(_numbers), self._calls
        keep = self, function, args, kwargs
        cancel = functools.partial(calls.cancel, number)
        futures = CallFutures(self._supervisor, calls.num_ranks, self._futures.thread, cancel, keep)
        asked = StayingCall(
            number=number,
            name=name_of(function),
            call=call,
            keeps=keeps,
            log=futures.log,
            settle=futures.settle,
        )
        if not calls.ask(asked):
            raise self._error_if_over()
        return futures, number

    def _error_if_over(self) -> GangError:
        error = self._calls.end
        if self._calls.is_closed or error is None:
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


_numbers = itertools.count(1)
"""Numbers of all gangs' calls: a reference from another gang finds no value."""
