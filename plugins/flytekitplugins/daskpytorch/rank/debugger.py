"""Debuggers in a rank: `breakpoint()` at the user's terminal, or an editor that attaches. Runs in a rank.

Ranks have no terminal. The driver grants its own terminal to one rank at a time. The rank then opens the
terminal and uses it as standard input, output and error while the prompt is shown.
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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wrapt import register_post_import_hook

from flytekitplugins.daskpytorch.errors import NoDebuggerError
from flytekitplugins.daskpytorch.extras import require_extra
from flytekitplugins.daskpytorch.protocol import orders, reports
from flytekitplugins.daskpytorch.protocol.debugging import PORTS_VARIABLE, Debugging

if TYPE_CHECKING:
    from flytekitplugins.daskpytorch.protocol.orders import RankOrder


MAX_DRAIN = 1.0
"""Maximum number of seconds that a debugger's prompt waits for the rank's earlier output to be shown."""
HOST = "127.0.0.1"
"""Address at which a rank waits for an editor's debugger. Only loopback, as whoever connects can run any code."""


@dataclass
class Prompt:
    """This rank's use of the driver's terminal for a debugger."""

    rank: int
    debugging: Debugging
    send: Callable[[reports.ShortReport], None]
    _granted: threading.Event = field(default_factory=threading.Event)
    _pid: int = field(default_factory=os.getpid)

    def obey(self, order: orders.Prompt | orders.Interrupt) -> None:
        """Let this rank's waiting debugger open the driver's terminal, or interrupt the main thread as Ctrl-C does.

        Ignore orders to other ranks.
        """
        if order.rank != self.rank:
            return
        if isinstance(order, orders.Prompt):
            self._granted.set()
        else:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def check(self) -> None:
        """Check that the rank can open the driver's terminal.

        Raises:
            NoDebuggerError: The rank has no terminal, or this process was forked by the rank.
        """
        if os.getpid() != self._pid:
            raise NoDebuggerError(
                f"a debugger was called for in a process that rank {self.rank} has started, as a DataLoader's worker: "
                "it is out of the terminal's reach. Load in the rank itself, with num_workers=0."
            )
        if (terminal := self.debugging.terminal) is not None and (found := terminal.open()) is not None:
            os.close(found)
            return
        raise NoDebuggerError(
            f"a debugger was called for in rank {self.rank}, by breakpoint() or pdb, and there is no terminal to talk "
            "to it. Start the run in a terminal of this machine; or with DASKPYTORCH_DEBUG=1, which trains in one rank "
            f"in the calling process; or with {PORTS_VARIABLE}={self.rank}:5678, with which this rank waits at that "
            "port of its host for an editor to attach. PYTHONBREAKPOINT=0 passes breakpoint() over."
        )

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Wait for the driver to grant its terminal, and use it as standard input, output and error in the block."""
        self.check()
        _drain()
        self._granted.clear()
        self.send(reports.AtPrompt())
        self._granted.wait()
        with self._in_place():
            yield

    def leave(self, *, steps: bool) -> None:
        """Tell the driver that the debugger's prompt is over. `steps`: True if this rank shows its next prompt soon."""
        self.send(reports.LeftPrompt(steps))

    @contextlib.contextmanager
    def _in_place(self) -> Iterator[None]:
        terminal = self.debugging.terminal.open() if self.debugging.terminal is not None else None
        if terminal is None:
            raise NoDebuggerError(
                f"a debugger was called for in rank {self.rank}, and the run's terminal has been closed. Start the run "
                f"in a terminal that stays open, or with {PORTS_VARIABLE}={self.rank}:5678 for an editor"
            )
        fcntl.flock(terminal, fcntl.LOCK_EX)  # ranks of other gangs may use the same terminal
        kept = [os.dup(number) for number in range(3)]
        for number in range(3):
            os.dup2(terminal, number)
        try:
            yield
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            for number, descriptor in enumerate(kept):
                os.dup2(descriptor, number)
                os.close(descriptor)
            os.close(terminal)


def watch_pdb(prompt: Prompt) -> None:
    """Show each prompt of pdb, also that of `breakpoint()`, at the driver's terminal."""
    register_post_import_hook(functools.partial(_at_terminal, prompt), "pdb")


def _at_terminal(prompt: Prompt, pdb: Any) -> None:
    usual = pdb.Pdb.interaction

    @functools.wraps(usual)
    def interaction(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.prompt == "(Pdb) ":
            self.prompt = f"(Pdb rank {prompt.rank}) "
        try:
            with prompt.shown():
                usual(self, *args, **kwargs)
        finally:
            prompt.leave(steps=_is_stepping(self))

    def set_trace(*, header: str | None = None) -> None:
        prompt.check()  # here, so that the traceback ends at the user's call
        debugger = pdb.Pdb(nosigint=True)  # the driver handles Ctrl-C while no prompt is shown
        if header is not None:
            debugger.message(header)
        here = inspect.currentframe()
        debugger.set_trace(here and here.f_back)

    pdb.Pdb.interaction = interaction
    pdb.set_trace = set_trace


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
    send(reports.Waits(f"rank {rank} waits for a debugger at {HOST}:{port} of {host}; attach, and it begins"))
    debugpy.wait_for_client()  # noqa: T100
