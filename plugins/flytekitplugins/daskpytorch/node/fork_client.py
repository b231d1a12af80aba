"""This process's fork server: starts it, finds it, asks it for ranks. Runs beside a Dask worker, or in the task.

The server stays for as long as this process lives: each gang after the first starts in a tenth of a second.
"""

import atexit
import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import spawn
from multiprocessing.connection import wait

from flytekitplugins.daskpytorch.node import fork_server
from flytekitplugins.daskpytorch.process import sigterm
from flytekitplugins.daskpytorch.process.system import check_system

END_TIMEOUT = 10.0
"""Seconds for a fork server to end its ranks and itself after the order to; a suspended server is killed then."""


class ForkServerLostError(ConnectionError):
    """The fork server is gone: it was killed, or the process that owns it is ending."""


class ForkServerFailedError(RuntimeError):
    """The fork server could not start ranks, or has crashed; another one would end in the same way."""


class ForkServerClient:
    """An agent's end: starts and kills its own ranks, hears of their exits. Closing it kills what is left of them."""

    def __init__(self, sock: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._socket = sock
        self._process = process
        """The server; None where another process has started it."""

    def fileno(self) -> int:
        """To wait for what it says."""
        return self._socket.fileno()

    def spawn(self, key: int, channel: int, output: int) -> None:
        """Fork a rank. `key` names it; `channel` and `output` are file descriptors that become the rank's own."""
        _ranks.add((id(self), key))
        try:
            socket.send_fds(self._socket, [json.dumps({"op": "spawn", "key": key}).encode()], [channel, output])
        except ConnectionError:  # the server may have said before why it ended
            while True:
                self._next_event()

    def kill(self, key: int, signum: int) -> None:
        """Signal a rank and everything it started, if it still runs."""
        self._socket.send(json.dumps({"op": "kill", "key": key, "signal": signum}).encode())

    def signal(self, key: int, signum: int) -> None:
        """Signal a rank alone, if it still runs."""
        self._socket.send(json.dumps({"op": "signal", "key": key, "signal": signum}).encode())

    def ask_readiness(self) -> None:
        """Have the server answer once its imports are done; to be called before the first `spawn`."""
        self._socket.send(json.dumps({"op": "answer"}).encode())

    def take_readiness(self) -> None:
        """Wait for the answer to `ask_readiness`.

        Raises:
            ForkServerFailedError: As `next_exit`.
            ForkServerLostError: As `next_exit`.
        """
        self._next_event()

    def next_exit(self) -> tuple[int, int]:
        """Wait for a rank's end: its key, and its exit code (negative: the signal that ended it).

        Raises:
            ForkServerFailedError: The server has ended by an error of its own, and every rank with it.
            ForkServerLostError: The server is gone, and every rank with it.
        """
        event = self._next_event()
        _ranks.discard((id(self), event["key"]))
        return event["key"], event["exitcode"]

    def _next_event(self) -> dict[str, int]:
        try:
            packet = self._socket.recv(fork_server.MAX_PACKET)
        except ConnectionResetError:  # the server ended with requests unread; what it sent before can be read still
            packet = self._socket.recv(fork_server.MAX_PACKET)
        if not packet:
            raise self._ended()
        event: dict[str, int] = json.loads(packet)
        if "error" in event:
            raise ForkServerFailedError(f"the process that ranks are forked from has failed: {event['error']}")
        return event

    def _ended(self) -> Exception:
        """Return the error for a server that ended without an error of its own."""
        exitcode = None
        if self._process is not None and _owned is not None:  # else this process ends the server, and does not wait
            with contextlib.suppress(subprocess.TimeoutExpired):
                exitcode = self._process.wait(1.0)
        if exitcode in (None, 0, -signal.SIGKILL, -signal.SIGTERM):
            return ForkServerLostError("the fork server ended")
        how = f"exit code {exitcode}" if exitcode > 0 else signal.Signals(-exitcode).name
        return ForkServerFailedError(
            f"the process that ranks are forked from has ended by {how}; the log of the worker or task has its words"
        )

    def close(self) -> None:
        """Kill what is left of this client's ranks."""
        self._socket.close()


@dataclass
class _Owned:
    process: subprocess.Popen[bytes] | None
    """None: the process before this one has started it."""
    control: socket.socket

    def has_ended(self) -> bool:
        """Whether the server is gone; the control socket may tell a little late, if a rank was being forked."""
        if self.process is not None and self.process.poll() is not None:
            return True
        return bool(wait([self.control], 0))  # it says nothing, so that is its end


_ranks: set[tuple[int, int]] = set()
"""Client's number and key of each rank of whose end nobody has heard."""
_owned: _Owned | None = None
_hand_over: str | None = None
"""The name of the socket by which the next owner finds the server."""
_imported_ahead: list[str] = []
_lock = threading.Lock()


def connect(start_method: str = "forkserver") -> ForkServerClient:
    """A new client of this process's fork server, which is started if it does not run.

    Takes milliseconds when it runs; the first rank waits for the imports otherwise.

    Args:
        start_method: `forkserver`, or `spawn`: its ranks are to be fresh interpreters, which import everything anew.

    Raises:
        GangStartError: This is not Linux.
    """
    check_system()
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, _lock:
        server = _running()
        socket.send_fds(server.control, [start_method.encode()], [theirs.fileno()])
    return ForkServerClient(mine, server.process)


def start_ahead() -> None:
    """Start this process's fork server, with all that its ranks will need, while nobody waits for it."""
    with _lock:
        _running()
    connect().close()


def import_ahead(module: str) -> None:
    """Have fork servers that this process starts from now on import this, too, before they fork ranks."""
    if module not in _imported_ahead:
        _imported_ahead.append(module)


def hand_over(key: str) -> None:
    """Let this process's fork server survive it, should it be killed, for the one that its parent starts in its place.

    The next owner finds it, with its imports done, by calling this with the same key. Where none comes the server
    ends after a minute; it ends at once with the parent, and with this process where that ends in good order.

    Without, a gang whose worker was killed takes 15 times as long to train on once the next one is registered.

    Args:
        key: The same for both processes, and not for others of the same parent.
    """
    global _hand_over
    with _lock:
        _hand_over = f"daskpytorch-{hashlib.sha256(f'{os.getppid()} {key}'.encode()).hexdigest()}"


def shutdown() -> None:
    """End this process's fork server and every rank it started; a later `connect` starts a new one."""
    global _owned
    with _lock:
        ended, _owned = _owned, None
        if ended is not None:
            with ended.control, contextlib.suppress(OSError):  # it may have ended
                ended.control.send(fork_server.END)
                if _ranks:  # else nobody waits for a server that imports
                    ended.control.settimeout(END_TIMEOUT)
                    ended.control.recv(1)  # until it has
            _ranks.clear()
            if ended.process is not None:
                ended.process.kill()  # the server has ended its ranks, or does not answer: suspended, for example
                ended.process.wait()


@atexit.register
def _shutdown_at_exit() -> None:
    with contextlib.suppress(KeyboardInterrupt, SystemExit):  # at a second Ctrl-C it ends without being waited for
        shutdown()


def _let_go() -> None:
    """Leave the server to the parent in a fork of this process: the server must not wait for the fork's end."""
    global _owned, _lock
    if _owned is not None:
        _owned.control.close()
    _owned, _lock = None, threading.Lock()  # another thread of the parent may have held the lock


os.register_at_fork(after_in_child=_let_go)


def _running() -> _Owned:
    """This process's fork server, which is started if it does not run. To be called with the lock held."""
    global _owned
    if _owned is None or _owned.has_ended():
        control = _inherit()
        _owned = _Owned(None, control) if control else _start()
    return _owned


def _inherit() -> socket.socket | None:
    """The way to the fork server of the process before this one."""
    if _hand_over is None:
        return None
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.suppress(OSError):  # there is none
        control.connect(f"\0{_hand_over}")
        if fork_server.is_of_this_user(control):
            return control
    control.close()
    return None


def _start() -> _Owned:
    spawn._check_not_importing_main()  # type: ignore[attr-defined] # noqa: SLF001 - a script without a guard would train in training
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, _open_hand_over() as hand_over:
        descriptors = [theirs.fileno(), *hand_over]
        command = fork_server.command("main", [*descriptors, *_imported_ahead], fork_server.path_here())
        # A Dask nanny has its worker's freed memory given back at once, which costs a training thousands of page faults
        # per step. The C library reads it when a process starts, so the ranks could not undo it themselves.
        env = {name: value for name, value in os.environ.items() if name != "MALLOC_TRIM_THRESHOLD_"}
        _ranks.clear()  # those of a server before have ended with it
        with sigterm.held_back():
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=descriptors, start_new_session=True, env=env
            )
    return _Owned(process, mine)


@contextlib.contextmanager
def _open_hand_over() -> Iterator[list[int]]:
    """What the server needs to survive this process: a socket for the next owner, and the parent's life to watch.

    Empty where it is not to survive, and where it cannot: before Linux 5.3, or while another has the socket's name.
    """
    with contextlib.ExitStack() as stack:
        descriptors: list[int] = []
        if _hand_over is not None:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            with contextlib.suppress(OSError):
                listener.bind(f"\0{_hand_over}")  # an abstract name: no file is left, however all this ends
                listener.listen()
                stack.callback(os.close, parent := os.pidfd_open(os.getppid()))
                descriptors += [listener.fileno(), parent]
        yield descriptors
