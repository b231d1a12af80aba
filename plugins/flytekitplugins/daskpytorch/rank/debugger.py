"""Debuggers in a rank: `breakpoint()` at a terminal, or an editor that attaches. Runs in a rank.

A rank that calls pdb waits until the driver or `daskpytorch attach` attaches a terminal. While a prompt is shown, a
pseudo-terminal is its standard input, output and error.
"""

from __future__ import annotations

import bdb
import contextlib
import fcntl
import functools
import os
import signal
import socket
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from flytekitplugins.daskpytorch.checks import require_extra
from flytekitplugins.daskpytorch.errors import NoDebuggerError
from flytekitplugins.daskpytorch.protocol import messages
from flytekitplugins.daskpytorch.protocol.debugging import DRIVER, INTERRUPT, PORTS_VARIABLE, RankFile, listen
from flytekitplugins.daskpytorch.rank.libraries import after_import
from flytekitplugins.daskpytorch.settings import DEBUG_VARIABLE

if TYPE_CHECKING:
    from flytekitplugins.daskpytorch.protocol.failure import Failure
    from flytekitplugins.daskpytorch.protocol.job import RankOrder


MAX_SAID = 200
HOST = "127.0.0.1"
"""Only loopback, as whoever connects can run any code."""


class Prompt:
    def __init__(self, order: RankOrder, send: Callable[[messages.ShortReport], None]) -> None:
        self.rank = order.place.rank
        self.folder = Path(order.scratch)
        self.timeout = order.job.settings.attach_timeout
        self._gang = order.job.gang
        self._send = send
        self._terminal: PseudoTerminal | None = None
        self.pid = os.getpid()
        self.failure: Failure | None = None
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
        """Call `interact` with the pseudo-terminal as standard input, output and error.

        `interact` returns True if the next prompt follows soon. Raises `NoDebuggerError` if no terminal was attached in
        time.
        """
        terminal = self._terminal = self._terminal or PseudoTerminal(self)
        self._describe(where)
        # Nobody may sit at the driver's terminal when a rank fails.
        folder = str(self.folder) if self.failure is None else None
        steps = False
        try:
            with terminal.prompt():
                self._send(messages.Debugged(where, folder, needs_terminal=not terminal.is_attached))
                steps = interact()
            if terminal.is_given_up:
                raise self._no_debugger(where)
        finally:
            if not steps:
                self._describe()
                terminal.leave()
            self._send(messages.Debugged(steps=steps))

    def _describe(self, prompt: str = "") -> None:
        RankFile(gang=self._gang, rank=self.rank, pid=self.pid, prompt=prompt).write(self.folder)

    def _no_debugger(self, where: str) -> NoDebuggerError:
        return NoDebuggerError(
            f"rank {self.rank} {where}, and for {self.timeout:g} s (Gang(attach_timeout=...)) no terminal was "
            f"attached to its debugger, as by `daskpytorch attach {self.rank}` on its machine, {os.uname().nodename}. "
            f"Or run in a terminal of that machine, or with {DEBUG_VARIABLE}=1 in the calling process, or with an "
            f"editor and {PORTS_VARIABLE}={self.rank}:5678. PYTHONBREAKPOINT=0 passes breakpoint() over."
        )


def watch_pdb(prompt: Prompt) -> None:
    after_import("pdb", "Pdb", functools.partial(_at_terminal, prompt))


def _at_terminal(prompt: Prompt, pdb: Any) -> None:
    usual = pdb.Pdb.interaction

    @functools.wraps(usual)
    def interaction(self: Any, frame: Any, *args: Any, **kwargs: Any) -> None:
        if os.getpid() != prompt.pid:  # a loader's worker, which has no terminal: pdb quits
            usual(self, frame, *args, **kwargs)
            return
        if self.prompt == "(Pdb) ":
            self.prompt = f"(Pdb rank {prompt.rank}) "
        self.nosigint = True  # the terminal handles Ctrl-C

        def interact() -> bool:
            usual(self, frame, *args, **kwargs)
            return _is_stepping(self)

        prompt.show(_place_of(frame, prompt.failure), interact)

    pdb.Pdb.interaction = interaction


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


# ---- The pseudo-terminal
#
# pdb, readline and the user's own `input()` work as at any terminal. The attached terminal's process serves the
# pseudo-terminal: it passes keys and output on, and can come and go without the rank's notice.

KEPT_FOR = 1.0
"""Seconds that a stepping rank keeps the driver's terminal, as a step over a collective may need another rank."""
LOOK_INTERVAL = 0.5
GREET_TIME = 1.0
MAX_STALL = 1.0
END_INPUT = b"\x15\x04"
"""Ctrl-U and Ctrl-D, which end a prompt's input."""


class PseudoTerminal:
    """Served by the process of the attached terminal."""

    is_given_up = False

    def __init__(self, of: Prompt) -> None:
        self._prompt = of
        self._master, self._slave = os.openpty()
        os.set_blocking(self._master, False)  # keys beyond the kernel's buffer are lost
        self._listener = listen(of.folder, of.rank)
        self._attached: socket.socket | None = None
        self._is_drivers = False
        self._is_at_prompt = False
        self._is_read = False
        self._since = 0.0
        threading.Thread(target=self._serve, name="daskpytorch-terminal", daemon=True).start()

    @property
    def is_attached(self) -> bool:
        return self._attached is not None

    @contextlib.contextmanager
    def prompt(self) -> Iterator[None]:
        _flush_output()
        _wait_until_read(1)  # the agent shows the rank's earlier output before the prompt
        kept = [os.dup(number) for number in range(3)]
        for number in range(3):
            os.dup2(self._slave, number)
        self.is_given_up, self._is_read = False, self.is_attached
        self._since, self._is_at_prompt = time.monotonic(), True
        try:
            yield
        finally:
            self._is_at_prompt, self._since = False, time.monotonic()
            _flush_output()
            if self.is_attached:
                _wait_until_read(self._master)
            for number, descriptor in enumerate(kept):
                os.dup2(descriptor, number)
                os.close(descriptor)

    def leave(self) -> None:
        if self._is_drivers:
            self._hang_up()

    def _hang_up(self) -> None:
        attached, self._attached = self._attached, None
        if attached is not None:
            with contextlib.suppress(OSError):  # the terminal's process has ended
                attached.shutdown(socket.SHUT_RDWR)

    # ---- in the thread of this terminal

    def _serve(self) -> None:
        while True:
            attached = self._attached
            ready = wait([self._listener, *([attached] if attached is not None else [])], LOOK_INTERVAL)
            if self._listener in ready:
                self._welcome()
            elif attached is not None and attached in ready:
                self._heed(attached)
            self._keep_time(time.monotonic())

    def _welcome(self) -> None:
        attaching, _ = self._listener.accept()
        attaching.settimeout(GREET_TIME)
        with contextlib.suppress(OSError):
            is_drivers = attaching.recv(1) == DRIVER
            if is_drivers and self.is_attached:  # a user was faster
                attaching.close()
                return
            self._hang_up()
            socket.send_fds(attaching, [DRIVER], [self._master])
            if self._is_read:
                os.write(self._slave, f"(Pdb rank {self._prompt.rank}) ".encode())
            self._attached, self._is_drivers, self._is_read = attaching, is_drivers, True

    def _heed(self, attached: socket.socket) -> None:
        key = b""
        with contextlib.suppress(OSError):
            key = attached.recv(1)
        if key == INTERRUPT and self._is_at_prompt:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        else:
            self._hang_up()

    def _keep_time(self, now: float) -> None:
        if not self._is_at_prompt:
            if self._is_drivers and now >= self._since + KEPT_FOR:
                self._hang_up()
            return
        self._since = now if self.is_attached else self._since
        if now >= self._since + self._prompt.timeout:
            self.is_given_up = True
            with contextlib.suppress(BlockingIOError):
                os.write(self._master, END_INPUT)


def _flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _wait_until_read(descriptor: int) -> None:
    deadline = time.monotonic() + MAX_STALL
    with contextlib.suppress(OSError):
        while any(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4))) and time.monotonic() < deadline:
            time.sleep(0.005)
