"""Starts this process's fork server, and asks it for ranks. Runs in a Dask worker or in the task.

The fork server lives as long as this process, so later gangs start in 0.1 s.
"""

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from multiprocessing.connection import wait

import psutil

from flytekitplugins.daskpytorch.node import fork_server
from flytekitplugins.daskpytorch.process import ending
from flytekitplugins.daskpytorch.process.system import NANNYS_MARK, check_system, path_here, without_nannys

END_TIMEOUT = 10.0
"""Seconds for a fork server to end its ranks and itself, before it is killed."""


class ForkServerLostError(ConnectionError):
    """The fork server was killed, or the Dask worker or task that it belongs to is ending."""


class ForkServerFailedError(RuntimeError):
    """The fork server could not start ranks, or has crashed, as a new one would."""


class ForkServerClient:
    """An agent's connection to the fork server. `close` kills the client's remaining ranks."""

    def __init__(self, sock: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self._socket = sock
        self._process = process

    def fileno(self) -> int:
        return self._socket.fileno()

    def spawn(self, key: int, channel: int, output: int) -> None:
        try:
            socket.send_fds(self._socket, [json.dumps([key, fork_server.SPAWN]).encode()], [channel, output])
        except ConnectionError as error:
            raise self._ended() from error

    def kill(self, key: int, signum: int) -> None:
        """Signal a rank, and all processes of its session."""
        self._socket.send(json.dumps([key, signum]).encode())

    def next_event(self) -> list[int]:
        """Wait until the fork server can start ranks (an empty list), and then for each rank's end.

        A rank's end has its key and exit code (-N: signal N). ForkServerFailedError or ForkServerLostError: all ranks
        have ended with the fork server.
        """
        try:
            packet = self._socket.recv(fork_server.MAX_PACKET)
        except ConnectionResetError:  # the fork server ended with unread requests; its last events can be read
            packet = self._socket.recv(fork_server.MAX_PACKET)
        if not packet:
            raise self._ended()
        event: list[int] = json.loads(packet)
        return event

    def _ended(self) -> Exception:
        exitcode = None
        if _owned is not None:  # else this process ends the fork server without a wait
            with contextlib.suppress(subprocess.TimeoutExpired):
                exitcode = self._process.wait(1.0)
        if exitcode in (None, 0, -signal.SIGKILL, -signal.SIGTERM):
            return ForkServerLostError("the fork server ended")
        how = f"exit code {exitcode}" if exitcode > 0 else signal.Signals(-exitcode).name
        return ForkServerFailedError(
            f"the process that ranks are forked from has ended with {how}: the log of the worker or task has its output"
        )

    def close(self) -> None:
        self._socket.close()


@dataclass
class _Owned:
    process: subprocess.Popen[bytes]
    control: socket.socket

    def has_ended(self) -> bool:
        """A rank that is being forked may delay the answer a little."""
        is_closed = bool(wait([self.control], 0))  # readable at the fork server's end only, as it sends nothing
        return is_closed or self.process.poll() is not None


_owned: _Owned | None = None
_imported_ahead: list[str] = []
_lock = threading.Lock()


def connect() -> ForkServerClient:
    global _owned
    check_system()
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, _lock:
        if _owned is None or _owned.has_ended():
            _owned = _start()
        socket.send_fds(_owned.control, [fork_server.CLIENT], [theirs.fileno()])
        return ForkServerClient(mine, _owned.process)


def import_ahead(module: str) -> None:
    """Make later fork servers import a module, or call `module:function`."""
    if module not in _imported_ahead:
        _imported_ahead.append(module)


def shutdown() -> None:
    global _owned
    with _lock:
        ended, _owned = _owned, None
        if ended is not None:
            with ended.control, contextlib.suppress(OSError, psutil.Error):  # the fork server may have ended
                ended.control.shutdown(socket.SHUT_WR)
                # A server without ranks may be busy with imports: no wait, just the kill below.
                if psutil.Process(ended.process.pid).children():
                    ended.control.settimeout(END_TIMEOUT)
                    ended.control.recv(1)  # returns at the fork server's end
            ended.process.kill()  # the fork server has ended its ranks, or is suspended
            ended.process.wait()


@atexit.register
def _shutdown_at_exit() -> None:
    with contextlib.suppress(KeyboardInterrupt, SystemExit):  # a second Ctrl-C ends the wait
        shutdown()


def _let_go() -> None:
    """In a forked child, close the copy of the connection, else the fork server would outlive its owner."""
    global _owned, _lock
    if _owned is not None:
        _owned.control.close()
    _owned, _lock = None, threading.Lock()  # another thread of the parent may have held the lock


os.register_at_fork(after_in_child=_let_go)


def _start() -> _Owned:
    _refuse_script_without_guard()
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = fork_server.command("main", [theirs.fileno(), *_imported_ahead], path_here())
        # A Dask nanny makes the C library return freed memory at once, for thousands of page faults per training step.
        # The C library reads the variable only when a process starts.
        kept = without_nannys(os.environ)
        env = {name: value for name, value in os.environ.items() if name != NANNYS_MARK or name in kept}
        with ending.sigterm_held_back():
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True, env=env
            )
    return _Owned(process, mine)


def _refuse_script_without_guard() -> None:
    """Refuse a script that starts a gang while `multiprocessing` imports it: each spawned process would train, too."""
    main = sys.modules["__main__"]
    # During the import `__main__` is `multiprocessing`'s own program. Afterwards both names have the same module.
    if sys.modules.get("__mp_main__", main) is not main and not hasattr(main, "__file__"):
        raise RuntimeError(
            "the script starts a gang while another process of the same script imports it. Start the gang below "
            "`if __name__ == '__main__':`"
        )
