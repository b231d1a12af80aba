"""A gang with one rank in the calling process, for debugging without fork and Dask. Driver and rank are one process.

Breakpoints of an editor, profilers and `pytest --pdb` work as in any program. The gang's supervisor runs in a thread.
The gang's only agent is an object, which replaces a node agent's messages by direct calls.
"""

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from flytekitplugins.daskpytorch import context
from flytekitplugins.daskpytorch.driver.agents import Agents, Call
from flytekitplugins.daskpytorch.driver.committer import Committer
from flytekitplugins.daskpytorch.driver.received import ReceivedResults
from flytekitplugins.daskpytorch.driver.request import Request
from flytekitplugins.daskpytorch.driver.state import GangState
from flytekitplugins.daskpytorch.driver.supervisor import Supervisor
from flytekitplugins.daskpytorch.node.agent import OwnNode
from flytekitplugins.daskpytorch.node.hardware import describe_node
from flytekitplugins.daskpytorch.process.log import say
from flytekitplugins.daskpytorch.protocol import messages, orders, reports
from flytekitplugins.daskpytorch.protocol.code import Code, Sources
from flytekitplugins.daskpytorch.protocol.framing import Connection
from flytekitplugins.daskpytorch.protocol.messages import AgentOrder, OnFailure
from flytekitplugins.daskpytorch.protocol.orders import RankOrder
from flytekitplugins.daskpytorch.protocol.payload import Piece
from flytekitplugins.daskpytorch.protocol.program import Program
from flytekitplugins.daskpytorch.protocol.script import ending_as_program
from flytekitplugins.daskpytorch.rank import process_group
from flytekitplugins.daskpytorch.rank.link import GangLink
from flytekitplugins.daskpytorch.rank.returned import unwrapped
from flytekitplugins.daskpytorch.rank.session import Session, completed, failure_of
from flytekitplugins.daskpytorch.settings import DEBUG_VARIABLE, Gang

DEVICES = "CUDA_VISIBLE_DEVICES"
"""Environment variable that the rank leaves unchanged, as the calling process may already use its GPUs."""


def run_here(
    function: Callable[[], Any],
    name: str,
    settings: Gang,
    received: ReceivedResults,
    results_folder: Callable[[], object] | None = None,
    **more: Any,
) -> Any:
    """Call a function as a gang's only rank, in this thread, and return its result.

    Args:
        function: The function to call.
        name: Function name or task name.
        settings: The user's settings. Restarts and hang detection are turned off.
        received: Receives the results that the function submits.
        results_folder: Returns the folder of the task's results. None outside a task.
        more: Further fields of the `Request`.

    Raises:
        BaseException: The function's exception with its traceback, or an error from `Supervisor.run`.
    """
    if settings.evaluate is not None:
        say(f"{name}: debugging: Gang(evaluate=...) has no effect, since there is one process")
    alone = replace(settings, backend="gloo", max_restarts=0, min_workers=None, hang_timeout=None, hints=False)
    code = Code(archive=b"", digest="")
    request = Request(name=name, call=b"", code=code, ranks_per_worker=1, settings=alone, **more)
    agent = _Agent(results_folder)
    supervisor = _Supervisor(request, agent, received=received)
    with ThreadPoolExecutor(1, "daskpytorch-gang") as thread:
        ended = thread.submit(supervisor.run)
        ended.add_done_callback(agent.note_end)
        try:
            returned = agent.call(function)
        except SystemExit as error:
            raise ended.exception() or error from error
        except KeyboardInterrupt:
            supervisor.cancel()
            raise
    ended.result()
    return returned


class _Supervisor(Supervisor):
    """Supervisor whose only agent needs no listener. Runs on every operating system."""

    needs_linux = False

    def _listen(self, committer: Committer, folder: Path, stack: contextlib.ExitStack) -> GangState:
        agent: Any = self._launcher
        post, order = self._calls.put, AgentOrder(driver=("", 0), token=b"", folder=folder)
        agents = Agents(launcher=agent, num_ranks=1, order=order, post=post)
        state = self._begin(agents, committer)
        agent.join(state, post, folder)
        how = f"debugging ({DEBUG_VARIABLE}, Gang(debug=True)): one rank, in this process"
        self._observers.note(how)
        stack.callback(agent.close)
        return state


class _Agent(OwnNode, Connection):
    """The gang's only agent. Also serves as launcher, as the driver's connection, and as the rank's channel."""

    heard_at = property(lambda _: math.inf, lambda *_: None)  # this agent never falls silent

    def __init__(self, results_folder: Callable[[], object] | None) -> None:
        super().__init__()
        self._results_folder = results_folder
        self._started: Future[tuple[RankOrder, GangLink, Session]] = Future()
        """The rank's order, link and session after its start, or the error that prevents starting."""
        self._is_closed = False

    def join(self, state: GangState, post: Callable[[Call], object], folder: Path) -> None:
        """Join a gang.

        Args:
            state: State of the gang.
            post: Queues calls for the gang's thread, from any thread.
            folder: Scratch folder, shared by driver and rank.
        """
        self._state = state
        self._post = post
        self._folder = folder

    # ---- the launcher

    def launch(self, orders: Sequence[AgentOrder], on_failure: OnFailure) -> None:
        """Send the agent's `Hello` to the driver."""
        self._say(messages.Hello(describe_node(self.workers[0], None), ("", 0)))

    def note_end(self, ended: Future[list[Any]]) -> None:
        """Make `call` raise the gang's error, if the gang ended before the rank's start."""
        if not self._started.done():
            self._started.set_exception(ended.exception())

    def close(self) -> None:
        """Refuse further reports of the rank, and end the rank's waits for the driver."""
        self._is_closed = True
        self._end_rank()

    # ---- the driver's connection

    def send(self, message: object) -> None:
        """Act on a message of the driver, in place of an agent. Runs in the gang's thread."""
        match message:
            case messages.Start():
                self._started.set_result(self._start(message))
            case messages.Tell(order):
                self._session.follow(order)
            case messages.Fetch(file):
                self._say(messages.Sent(file))
            case messages.Bring(chosen):
                self._session.follow(chosen)
            case messages.Stop():
                self._end_rank()
            case messages.Dump() | messages.Close():
                pass

    def hang_up(self) -> None:
        """Do nothing, because the rank is the calling process."""

    def _say(self, message: messages.FromAgent) -> None:
        self._post(partial(self._state.hear, self, message))

    def _start(self, start: messages.Start) -> tuple[RankOrder, GangLink, Session]:
        [place], job = start.places, start.job
        order = RankOrder(
            place=place,
            job=job,
            sources=Sources(folders=(), script=None),
            program=Program(),
            scratch=str(self._folder),
            directory=str(Path.cwd()),
            path=sys.path,
        )
        environment = orders.environment(os.environ, place, job, None, self._folder)
        link = GangLink(self, order)
        link.folder = self._results_folder
        link.take(orders.Arrived(job.attempt, orders.START))
        return order, link, Session(order, link, environment)

    @property
    def _session(self) -> Session:
        return self._started.result()[2]

    def _end_rank(self) -> None:
        if self._started.done():
            _, link, _ = self._started.result()
            link.is_over = True
            link.ended.set()

    # ---- the rank's channel

    def send_bytes(self, data: bytes, /) -> None:
        """Forward the rank's reports to the driver.

        Raises:
            OSError: The gang has ended, or the rank has forked this process.
        """
        if self._is_closed:
            raise OSError("the gang has ended")
        keep = self._state.received.keep
        kept = [keep(0, report) if isinstance(report, Piece) else report for report in reports.unpack(data)]
        self._post(partial(self._state.hear_of_rank, self, 0, kept))

    # ---- the rank

    def call(self, function: Callable[[], Any]) -> Any:
        """Wait until the driver starts the rank, then call the function and return its result."""
        order, link, session = self._started.result()
        exitcode = 1
        try:
            with _as_rank(order, session):
                link.observers.open(order.job.observers)
                returned = None
                with session.at_work(), ending_as_program():
                    returned = unwrapped(completed(function()))
                link.send(reports.Returned(stopped_early=session.rank.stop_signal.has_fired))
                session.see_out()
            exitcode = 0
        except KeyboardInterrupt:
            self._post(self._state.cancel)
            raise
        except BaseException as error:
            link.send(failure_of(error, time.time(), link, is_final=False))
            raise
        finally:
            link.observers.tell("close", exitcode or int(session.rank.stop_signal.has_fired))
            stopped = link.is_over and exitcode != 0
            self._say(messages.Exited(0, exitcode, stopped=stopped, out_of_memory=False, log_tail="", time=time.time()))
        return returned


@contextlib.contextmanager
def _as_rank(order: RankOrder, session: Session) -> Iterator[None]:
    """Make this process the rank: environment, process group and `current_rank()`. Restore all three at the end."""
    outer = context.current_rank()
    with _changed(session.environment):
        process_group.install()
        process_group.expect(order.place, order.job, lambda: None)
        try:
            process_group.join()
            context.enter(session.rank)
            yield
        finally:
            context.enter(outer)
            process_group.leave()


@contextlib.contextmanager
def _changed(environment: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update({name: value for name, value in environment.items() if name != DEVICES})
    try:
        yield
    finally:
        for name in environment:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if name in environment})
