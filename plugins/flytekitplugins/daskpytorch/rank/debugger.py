"""Debuggers in a rank: `breakpoint()` at a terminal, or an editor that attaches. Runs in a rank.

A rank that calls pdb waits until the driver or `daskpytorch attach` attaches a terminal. While a prompt is shown, a
pseudo-terminal is its standard input, output and error: pdb, readline and the user's own `input()` work as at any
terminal. The attached terminal's process has the other end, and passes keys and output on.
"""

from __future__ import annotations

import bdb
import contextlib
import fcntl
import functools
import os
import select
import socket
import sys
import termios
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from wrapt import wrap_function_wrapper

from flytekitplugins.daskpytorch.checks import require_extra
from flytekitplugins.daskpytorch.errors import NoDebuggerError
from flytekitplugins.daskpytorch.protocol import messages
from flytekitplugins.daskpytorch.protocol.debugging import PORTS_VARIABLE, PROMPT, STEPS, RankFile, listen
from flytekitplugins.daskpytorch.rank.libraries import after_import
from flytekitplugins.daskpytorch.settings import DEBUG_VARIABLE

if TYPE_CHECKING:
    from flytekitplugins.daskpytorch.protocol.failure import Failure
    from flytekitplugins.daskpytorch.protocol.job import RankOrder


MAX_SAID = 200
HOST = "127.0.0.1"
"""Only loopback, as whoever connects can run any code."""


MAX_STALL = 1.0


class Prompt:
    def __init__(self, order: RankOrder, send: Callable[[messages.ShortReport], None]) -> None:
        self.rank = order.place.rank
        self.pid = os.getpid()
        self.failure: Failure | None = None
        self._folder = Path(order.scratch)
        self._timeout = order.job.settings.attach_timeout
        self._gang = order.job.gang
        self._send = send
        self._where = ""
        self._listener: socket.socket | None = None
        self._terminal: _Terminal | None = None
        self._describe()

    def hold(self, error: BaseException, failure: Failure) -> None:
        """Hold the rank in pdb's post-mortem mode until a terminal has attached and left, or none attaches in time.

        Quit debuggers, failed GPUs, and consequences of another rank's end hold no rank.
        """
        is_own = isinstance(error, Exception) and not isinstance(error, (bdb.BdbQuit, NoDebuggerError))
        if not is_own or failure.is_consequence or failure.gpu_fault:
            return
        import pdb  # noqa: T100

        self.failure = failure
        try:
            # NoDebuggerError, or a signal's exception, as torch's for a lost worker of a loader: `error` is the news.
            with contextlib.suppress(Exception, KeyboardInterrupt):
                pdb.post_mortem(error.__traceback__)
        finally:
            self.failure = None

    def show(self, where: str, interact: Callable[[], bool]) -> None:
        """Call `interact` with an attached terminal as standard input, output and error, again if that is closed.

        `interact` returns True if the next prompt follows soon: the terminal then leaves by itself after a second.
        Raises `NoDebuggerError` if no terminal was attached in time.
        """
        self._where, steps = where, False
        self._describe(where)
        self._listener = self._listener or listen(self._folder, self.rank)
        kept = [os.dup(number) for number in range(3)]
        try:
            while True:
                try:
                    self._attach(self._listener)
                    steps = interact()
                    break
                except OSError:  # pdb writes at a closed terminal, too, before it quits
                    if self.has_terminal():
                        raise
        finally:
            _flush_output()
            for number, descriptor in enumerate(kept):
                os.dup2(descriptor, number)
                os.close(descriptor)
            if self._terminal is not None and steps:
                self._terminal.tell(STEPS)
            else:
                self._hang_up()
            self._describe()
            self._send(messages.Debugged())

    def has_terminal(self) -> bool:
        return self._terminal is not None and self._terminal.is_open()

    def _attach(self, listener: socket.socket) -> None:
        # Nobody may sit at the driver's terminal when a rank fails.
        folder = str(self._folder) if self.failure is None else None
        _flush_output()
        if not self.has_terminal():
            self._hang_up()
            _await_agent()  # the agent shows the rank's earlier output before the prompt
            self._send(messages.Debugged(self._where, folder, needs_terminal=not wait([listener], 0)))
            listener.settimeout(self._timeout)
            try:
                self._terminal = _Terminal(listener.accept()[0])
            except TimeoutError:
                raise self._no_debugger() from None
        self._send(messages.Debugged(self._where, folder))
        if self._terminal is not None:
            self._terminal.tell(PROMPT)
            for number in range(3):
                os.dup2(self._terminal.descriptor, number)

    def _hang_up(self) -> None:
        if self._terminal is not None:
            self._terminal.close()
            self._terminal = None

    def _describe(self, prompt: str = "") -> None:
        RankFile(gang=self._gang, rank=self.rank, pid=self.pid, prompt=prompt).write(self._folder)

    def _no_debugger(self) -> NoDebuggerError:
        return NoDebuggerError(
            f"rank {self.rank} {self._where}, and for {self._timeout:g} s (Gang(attach_timeout=...)) no terminal was "
            f"attached to its debugger, as by `daskpytorch attach {self.rank}` on its machine, {os.uname().nodename}. "
            f"Or run in a terminal of that machine, or with {DEBUG_VARIABLE}=1 in the calling process, or with an "
            f"editor and {PORTS_VARIABLE}={self.rank}:5678. PYTHONBREAKPOINT=0 passes breakpoint() over."
        )


class _Terminal:
    """An attached terminal, whose process has the other end of this pseudo-terminal."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        others, self.descriptor = os.openpty()
        try:
            socket.send_fds(connection, [PROMPT], [others])
        finally:
            os.close(others)

    def is_open(self) -> bool:
        poll = select.poll()
        poll.register(self.descriptor, 0)
        return not poll.poll(0)  # else a hang-up

    def tell(self, state: bytes) -> None:
        with contextlib.suppress(OSError):  # the terminal's process has ended
            self._connection.send(state)

    def close(self) -> None:
        os.close(self.descriptor)
        self._connection.close()


def watch_pdb(prompt: Prompt) -> None:
    after_import("pdb", "Pdb", functools.partial(_at_terminal, prompt))


def _at_terminal(prompt: Prompt, pdb: Any) -> None:
    def interaction(usual: Callable[..., None], debugger: Any, args: Any, kwargs: Any) -> None:
        if os.getpid() != prompt.pid:  # a loader's worker, which has no terminal: pdb quits
            usual(*args, **kwargs)
            return
        if debugger.prompt == "(Pdb) ":
            debugger.prompt = f"(Pdb rank {prompt.rank}) "
        debugger.nosigint = True  # the terminal handles Ctrl-C

        def interact() -> bool:
            usual(*args, **kwargs)
            return _is_stepping(debugger)

        prompt.show(_place_of(args[0], prompt.failure), interact)

    wrap_function_wrapper(pdb, "Pdb.interaction", interaction)


def _place_of(frame: FrameType | None, failure: Failure | None) -> str:
    if failure is not None:
        said, *_ = failure.message.splitlines() or [""]
        return f"raised {failure.type_name}: {said[:MAX_SAID]}"
    if frame is None:
        return "is in pdb's post-mortem mode"
    return f"stops at {frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"


def _is_stepping(debugger: Any) -> bool:
    """Return True if pdb shows its next prompt soon. After `continue`, `stoplineno` is -1."""
    return not debugger.quitting and getattr(debugger, "stoplineno", -1) != -1 and sys.gettrace() is not None


def explain(error: BaseException, rank: int) -> None:
    if isinstance(error, bdb.BdbQuit) and not error.args:
        error.args = (f"rank {rank} was quit in its debugger, and all others with it",)


def wait_for_editor(order: RankOrder, send: Callable[[messages.ShortReport], None]) -> None:
    rank = order.place.rank
    if (port := order.job.debugging.ports.get(rank)) is None:
        return
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # no warning of Python's frozen modules
    require_extra("debug", f"{PORTS_VARIABLE} (rank {rank})")
    import debugpy  # noqa: T100

    debugpy.listen((HOST, port))  # noqa: T100
    host = os.uname().nodename
    text = f"waits for a debugger at {HOST}:{port} of {host}; attach, and it begins"
    send(messages.Noted(text))
    send(messages.Debugged(text))
    debugpy.wait_for_client()  # noqa: T100


def _flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a closed terminal
            stream.flush()


def _await_agent() -> None:
    deadline = time.monotonic() + MAX_STALL
    with contextlib.suppress(OSError):
        while any(fcntl.ioctl(1, termios.FIONREAD, bytes(4))) and time.monotonic() < deadline:
            time.sleep(0.005)
