"""Debuggers in a rank: `breakpoint()` at a terminal, or an editor that attaches. Runs in a rank.

Ranks have no terminal. The driver grants its own terminal to one rank at a time. A rank that cannot open the driver's
terminal makes a pseudo-terminal, to which users attach by `daskpytorch attach`. While the prompt is shown, the rank
uses the terminal as standard input, output and error.
"""

from __future__ import annotations

import bdb
import contextlib
import fcntl
import functools
import inspect
import os
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from flytekitplugins.daskpytorch.errors import NoDebuggerError
from flytekitplugins.daskpytorch.extras import require_extra
from flytekitplugins.daskpytorch.protocol import orders, reports
from flytekitplugins.daskpytorch.protocol.attaching import Awaits, TerminalOrder
from flytekitplugins.daskpytorch.protocol.debugging import PORTS_VARIABLE
from flytekitplugins.daskpytorch.rank.libraries import after_import
from flytekitplugins.daskpytorch.rank.pseudo_terminal import PseudoTerminal

if TYPE_CHECKING:
    from flytekitplugins.daskpytorch.protocol.failure import Failure
    from flytekitplugins.daskpytorch.protocol.orders import Job, RankOrder


MAX_DRAIN = 1.0
"""Maximum number of seconds that a debugger's prompt waits for the rank's earlier output to be shown."""
MAX_SAID = 200
"""Maximum number of characters of an exception's text in the notice that its rank is held."""
HOST = "127.0.0.1"
"""Address at which a rank waits for an editor's debugger. Only loopback, as whoever connects can run any code."""


class Prompt:
    """This rank's use of a terminal for a debugger: the driver's terminal, or terminals that attach."""

    def __init__(self, rank: int, job: Job, send: Callable[[reports.ShortReport], None]) -> None:
        self.rank = rank
        self._terminal = job.debugging.terminal
        self._command = f"{job.debugging.attach} {rank}"
        self._timeout = job.settings.attach_timeout
        self._send = send
        self._granted = threading.Event()
        self._attached = PseudoTerminal(send)
        self._pid = os.getpid()
        self.failure: Failure | None = None
        """Report of the exception for which the rank is held. None: the rank is not held."""

    def hold(self, error: BaseException, failure: Failure) -> None:
        """Hold the rank in pdb's post-mortem mode until a terminal has attached and left, or none attaches in time.

        Quit debuggers, failed GPUs, and consequences of another rank's end hold no rank.

        Args:
            error: The exception of the user's function.
            failure: Report of the exception, for the driver.
        """
        is_own = isinstance(error, Exception) and not isinstance(error, (bdb.BdbQuit, NoDebuggerError))
        if not is_own or failure.is_consequence or failure.gpu_fault:
            return
        import pdb  # noqa: T100

        self.failure = failure
        debugger = pdb.Pdb(nosigint=True)
        debugger.reset()
        usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # between calls, SIGINT has no effect
        try:
            # NoDebuggerError, or a signal's exception, as torch's for a lost worker of a loader: `error` is the news.
            with contextlib.suppress(Exception, KeyboardInterrupt):
                debugger.interaction(None, error.__traceback__)
        finally:
            signal.signal(signal.SIGINT, usual)
            self.failure = None

    def note_call(self, *, is_ending: bool) -> None:
        """Record the driver's newest order about a call. `is_ending`: True if the call ends, with its prompts."""
        self._attached.is_call_ending = is_ending

    def obey(self, order: orders.Prompt | orders.Interrupt | TerminalOrder) -> None:
        """Let this rank's waiting debugger open the driver's terminal, or interrupt the main thread as Ctrl-C does.

        Also follow the orders of attached terminals. Ignore orders to other ranks.
        """
        if order.rank != self.rank:
            return
        match order:
            case orders.Prompt():
                self._granted.set()
            case orders.Interrupt():
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            case _:
                self._attached.follow(order)

    def check(self) -> None:
        """Check that this process can have a debugger.

        Raises:
            NoDebuggerError: The rank has forked this process.
        """
        if os.getpid() != self._pid:
            raise NoDebuggerError(
                f"a debugger was called for in a process that rank {self.rank} has started, as a DataLoader's worker: "
                "it is out of the terminal's reach. Load in the rank itself, with num_workers=0."
            )

    @contextlib.contextmanager
    def shown(self, where: str) -> Iterator[None]:
        """Wait for a terminal, and use it as standard input, output and error in the block.

        Args:
            where: Text about the rank for users, such as `stops at train.py:12 (train)`.

        Raises:
            KeyboardInterrupt: The driver ends the call.
            NoDebuggerError: No terminal was attached in time, or this process was forked by the rank.
        """
        self.check()
        _drain()
        terminal = self._terminal.open() if self._terminal is not None and self.failure is None else None
        if terminal is None:  # also for a held rank: the driver's terminal may have nobody in front of it
            with self._at_attached(where):
                yield
            return
        self._granted.clear()
        self._send(reports.AtPrompt())
        self._granted.wait()
        try:
            fcntl.flock(terminal, fcntl.LOCK_EX)  # ranks of other gangs may use the same terminal
            with _in_place(terminal):
                yield
        finally:
            fcntl.flock(terminal, fcntl.LOCK_UN)  # a process forked at the prompt shares the lock, and may live on
            os.close(terminal)

    @contextlib.contextmanager
    def _at_attached(self, where: str) -> Iterator[None]:
        self._send(Awaits(where, self._timeout))
        with self._attached.opened(self._timeout) as terminal:
            try:
                with _in_place(terminal.slave):
                    yield
            except OSError:
                if not terminal.is_given_up:
                    raise
        if terminal.is_given_up and self._attached.is_call_ending:
            raise KeyboardInterrupt
        if terminal.is_given_up:
            raise NoDebuggerError(
                f"rank {self.rank} {where}, and for {self._timeout:g} s (Gang(attach_timeout=...)) no terminal was "
                f"attached to its debugger, as by {self._command}. Or start the run in a terminal of the rank's "
                "machine; or with DASKPYTORCH_DEBUG=1, which trains in one rank in the calling process; "
                f"or with {PORTS_VARIABLE}={self.rank}:5678, with which this rank waits at that port of its host for "
                "an editor to attach. PYTHONBREAKPOINT=0 passes breakpoint() over."
            )

    def leave(self, *, steps: bool) -> None:
        """Tell the driver that the debugger's prompt is over. `steps`: True if this rank shows its next prompt soon."""
        self._send(reports.LeftPrompt(steps))


@contextlib.contextmanager
def _in_place(terminal: int) -> Iterator[None]:
    """Use a terminal as standard input, output and error in the block."""
    kept = [os.dup(number) for number in range(3)]
    for number in range(3):
        os.dup2(terminal, number)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # a pseudo-terminal that has hung up
                stream.flush()
        for number, descriptor in enumerate(kept):
            os.dup2(descriptor, number)
            os.close(descriptor)


def watch_pdb(prompt: Prompt) -> None:
    """Show each prompt of pdb, also that of `breakpoint()`, at the driver's terminal."""
    after_import("pdb", "Pdb", functools.partial(_at_terminal, prompt))


def _at_terminal(prompt: Prompt, pdb: Any) -> None:
    usual = pdb.Pdb.interaction

    @functools.wraps(usual)
    def interaction(self: Any, frame: Any, *args: Any, **kwargs: Any) -> None:
        if self.prompt == "(Pdb) ":
            self.prompt = f"(Pdb rank {prompt.rank}) "
        steps = False
        try:
            with prompt.shown(_place_of(frame, prompt.failure)):
                usual(self, frame, *args, **kwargs)
            steps = _is_stepping(self)
        finally:
            prompt.leave(steps=steps)

    def set_trace(*, header: str | None = None) -> None:
        prompt.check()  # here, so that the traceback ends at the user's call
        debugger = pdb.Pdb(nosigint=True)  # the driver handles Ctrl-C while no prompt is shown
        if header is not None:
            debugger.message(header)
        here = inspect.currentframe()
        debugger.set_trace(here and here.f_back)

    pdb.Pdb.interaction = interaction
    pdb.set_trace = set_trace


def _place_of(frame: FrameType | None, failure: Failure | None) -> str:
    """Return the text for users about the place of a debugger's prompt. pdb's post-mortem mode has no frame."""
    if failure is not None:
        said, *_ = failure.message.splitlines() or [""]
        return f"raised {failure.type_name}: {said[:MAX_SAID]}"
    if frame is None:
        return "is in pdb's post-mortem mode"
    return f"stops at {frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"


def _is_stepping(debugger: Any) -> bool:
    """Return True if pdb is stepping, and so shows its next prompt soon. After `continue`, `stoplineno` is -1."""
    return not debugger.quitting and getattr(debugger, "stoplineno", -1) != -1 and sys.gettrace() is not None


def _drain() -> None:
    """Wait until the agent has read the rank's earlier output, so that the output is shown before the prompt."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    deadline = time.monotonic() + MAX_DRAIN
    with contextlib.suppress(OSError):
        while any(fcntl.ioctl(1, termios.FIONREAD, bytes(4))) and time.monotonic() < deadline:
            time.sleep(0.005)


def explain(error: BaseException, rank: int) -> None:
    """Name the rank in the error of a debugger that the user has quit, and cut pdb's frames from the traceback.

    Other errors stay as they are.
    """
    if isinstance(error, bdb.BdbQuit) and not error.args:
        error.args = (f"rank {rank} was quit in its debugger, and all others with it",)
        here = error.__traceback__
        while here is not None and here.tb_next is not None:
            if here.tb_next.tb_frame.f_code.co_filename == bdb.__file__:
                here.tb_next = None
            here = here.tb_next


def wait_for_editor(order: RankOrder, send: Callable[[reports.ShortReport], None]) -> None:
    """Wait until an editor has attached to this rank's debugging port, if the user has given the rank one.

    `breakpoint()` then stops in the editor.

    Raises:
        ImportError: debugpy is not installed on this rank's host.
    """
    rank = order.place.rank
    if (port := order.job.debugging.ports.get(rank)) is None:
        return
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # no warning of Python's frozen modules
    require_extra("debug", f"{PORTS_VARIABLE} (rank {rank})")
    import debugpy  # noqa: T100

    debugpy.listen((HOST, port))  # noqa: T100
    host = os.uname().nodename
    text = f"waits for a debugger at {HOST}:{port} of {host}; attach, and it begins"
    send(reports.Noted(text, is_debugged=True))
    debugpy.wait_for_client()  # noqa: T100
