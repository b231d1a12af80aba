"""Starts or finds this process's fork server, and asks the fork server for ranks. Runs in a Dask worker or in the task.

The fork server lives as long as this process, so later gangs start in 0.1 s.
"""

import atexit
import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait

from flytekitplugins.daskpytorch.node import fork_server
from flytekitplugins.daskpytorch.process import signals
from flytekitplugins.daskpytorch.process.system import check_system, is_of_this_user, path_here
from flytekitplugins.daskpytorch.protocol.start_variables import NANNYS_MARK, without_nannys

END_TIMEOUT = 10.0
"""Seconds that a fork server gets to end its ranks and itself, when told to end. Then the fork server is killed."""


class ForkServerLostError(ConnectionError):
    """The fork server was killed, or the Dask worker or task that it belongs to is ending."""


class ForkServerFailedError(RuntimeError):
    """The fork server could not start ranks, or has crashed. A new fork server would fail in the same way."""


class ForkServerClient:
    """An agent's connection to the fork server: starts and kills ranks, and receives their exit codes.

    `close` kills the client's remaining ranks.
    """

    def __init__(self, sock: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._socket = sock
        self._process = process
        """Process of the fork server. None if a killed predecessor of this process has started the fork server."""

    def fileno(self) -> int:
        """Return a file descriptor, readable when the fork server reports an event, such as a rank's exit, or ends."""
        return self._socket.fileno()

    def spawn(self, key: int, channel: int, *outputs: int) -> None:
        """Make the fork server start a rank.

        Args:
            key: Number of the rank among this client's ranks.
            channel: File descriptor of the rank's end of the pipe to its agent.
            outputs: File descriptor that becomes the rank's standard output and error, or one for each of them.
        """
        _ranks.add((id(self), key))
        try:
            socket.send_fds(self._socket, [json.dumps({"op": "spawn", "key": key}).encode()], [channel, *outputs])
        except ConnectionError:  # the fork server may have sent an error event before
            while True:
                self._next_event()

    def kill(self, key: int, signum: int) -> None:
        """Send a signal to the running rank with this key, and to all processes of the rank's session."""
        self._socket.send(json.dumps({"op": "kill", "key": key, "signal": signum}).encode())

    def signal(self, key: int, signum: int) -> None:
        """Send a signal to the running rank with this key, but not to its child processes."""
        self._socket.send(json.dumps({"op": "signal", "key": key, "signal": signum}).encode())

    def take_readiness(self) -> None:
        """Wait for the fork server's first event, which says that the fork server can start ranks.

        Raises:
            ForkServerFailedError: The fork server has ended by an error of its own, and all ranks with it.
            ForkServerLostError: The fork server was killed or closed, and all ranks with it.
        """
        self._next_event()

    def next_exit(self) -> tuple[int, int]:
        """Wait until one of this client's ranks ends, and return its exit code.

        Returns:
            The rank's key and its exit code. Code -N: signal N has ended the rank.

        Raises:
            ForkServerFailedError: The fork server has ended by an error of its own, and all ranks with it.
            ForkServerLostError: The fork server was killed or closed, and all ranks with it.
        """
        while not (event := self._next_event()):
            pass  # nobody has taken the readiness
        _ranks.discard((id(self), event["key"]))
        return event["key"], event["exitcode"]

    def _next_event(self) -> dict[str, int]:
        try:
            packet = self._socket.recv(fork_server.MAX_PACKET)
        except ConnectionResetError:  # the fork server ended with unread requests; its last events can be read
            packet = self._socket.recv(fork_server.MAX_PACKET)
        if not packet:
            raise self._ended()
        event: dict[str, int] = json.loads(packet)
        if "error" in event:
            raise ForkServerFailedError(
                f"the process that ranks are forked from has failed: {event['error']}. The log of the worker or task "
                "has its output"
            )
        return event

    def _ended(self) -> Exception:
        """Return the error to raise for a fork server that has ended without reporting one."""
        exitcode = None
        if self._process is not None and _owned is not None:  # else this process ends the fork server without a wait
            with contextlib.suppress(subprocess.TimeoutExpired):
                exitcode = self._process.wait(1.0)
        if exitcode in (None, 0, -signal.SIGKILL, -signal.SIGTERM):
            return ForkServerLostError("the fork server ended")
        how = f"exit code {exitcode}" if exitcode > 0 else signal.Signals(-exitcode).name
        return ForkServerFailedError(
            f"the process that ranks are forked from has ended with {how}: the log of the worker or task has its output"
        )

    def close(self) -> None:
        """Kill this client's remaining ranks."""
        self._socket.close()


@dataclass
class _Owned:
    process: subprocess.Popen[bytes] | None
    """Process of the fork server. None if a killed predecessor of this process has started the fork server."""
    control: socket.socket

    def has_ended(self) -> bool:
        """Return True if the fork server has ended. A rank that is being forked may delay the answer a little."""
        if self.process is not None and self.process.poll() is not None:
            return True
        return bool(wait([self.control], 0))  # readable only at its end, since the fork server sends nothing


_ranks: set[tuple[int, int]] = set()
"""Ranks that count as running: the `id` of the rank's `ForkServerClient`, and the rank's key there."""
_owned: _Owned | None = None
_hand_over: str | None = None
"""Name of the abstract Unix socket at which a successor of this process finds the fork server. None: the fork server
ends with this process."""
_imported_ahead: list[str] = []
_lock = threading.Lock()


def connect(start_method: str = "forkserver") -> ForkServerClient:
    """Return a new client of this process's fork server, and start the fork server if none runs.

    A running fork server answers in milliseconds. Otherwise the first rank waits for the fork server's imports.

    Args:
        start_method: `forkserver` forks ranks. `spawn` starts ranks as fresh interpreters, which import all modules.

    Raises:
        GangStartError: The operating system is not Linux.
    """
    check_system()
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, _lock:
        server = _running()
        socket.send_fds(server.control, [start_method.encode()], [theirs.fileno()])
    return ForkServerClient(mine, server.process)


def start_ahead() -> None:
    """Start this process's fork server and its imports before any gang needs ranks."""
    with _lock:
        _running()
    connect().close()


def import_ahead(module: str) -> None:
    """Make fork servers that this process starts later import a module. For `module:function`, they also call it."""
    if module not in _imported_ahead:
        _imported_ahead.append(module)


def hand_over(key: str) -> None:
    """Let this process's fork server survive a kill of this process, and serve a successor.

    A successor is a process that the same parent starts, such as the next worker of a Dask nanny. The successor calls
    this function with the same key, and finds the fork server with its imports done. Without a successor, the fork
    server ends after a minute, or at once if the parent ends or this process exits normally.

    Without a hand-over, a gang whose worker was killed needs 15 times as long to resume after the new worker registers.

    Args:
        key: Name shared by both processes, and unique among the parent's children.
    """
    global _hand_over
    with _lock:
        _hand_over = f"daskpytorch-{hashlib.sha256(f'{os.getppid()} {key}'.encode()).hexdigest()}"


def shutdown() -> None:
    """End this process's fork server and all of its ranks. A later `connect` starts a new fork server."""
    global _owned
    with _lock:
        ended, _owned = _owned, None
        if ended is not None:
            with ended.control, contextlib.suppress(OSError):  # the fork server may have ended
                ended.control.send(fork_server.END)
                if _ranks:  # a server without ranks may be busy with imports: no wait, just the kill below
                    ended.control.settimeout(END_TIMEOUT)
                    ended.control.recv(1)  # returns at the fork server's end
            _ranks.clear()
            if ended.process is not None:
                ended.process.kill()  # the fork server has ended its ranks, or is suspended
                ended.process.wait()


@atexit.register
def _shutdown_at_exit() -> None:
    with contextlib.suppress(KeyboardInterrupt, SystemExit):  # a second Ctrl-C ends the wait
        shutdown()


def _let_go() -> None:
    """In a forked child of this process, close the copy of the connection to the fork server.

    Otherwise the fork server would outlive the child's parent, its owner.
    """
    global _owned, _lock
    if _owned is not None:
        _owned.control.close()
    _owned, _lock = None, threading.Lock()  # another thread of the parent may have held the lock


os.register_at_fork(after_in_child=_let_go)


def _running() -> _Owned:
    """Return this process's fork server, and start the fork server if none runs. The caller must hold `_lock`."""
    global _owned
    if _owned is None or _owned.has_ended():
        control = _inherit()
        _owned = _Owned(None, control) if control else _start()
    return _owned


def _inherit() -> socket.socket | None:
    """Return a connection to the fork server of a killed predecessor of this process. None if there is none."""
    if _hand_over is None:
        return None
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.suppress(OSError):  # no server listens at that name
        control.connect(f"\0{_hand_over}")
        if is_of_this_user(control):
            return control
    control.close()
    return None


def _start() -> _Owned:
    _refuse_script_without_guard()
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, _open_hand_over() as hand_over:
        descriptors = [theirs.fileno(), *hand_over]
        command = fork_server.command("main", [*descriptors, *_imported_ahead], path_here())
        # A Dask nanny makes the C library return freed memory at once. The price is thousands of page faults per
        # training step. The C library reads the variable only when a process starts.
        kept = without_nannys(os.environ)
        env = {name: value for name, value in os.environ.items() if name != NANNYS_MARK or name in kept}
        _ranks.clear()  # ranks of an earlier server have ended with it
        with signals.sigterm_held_back():
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=descriptors, start_new_session=True, env=env
            )
    return _Owned(process, mine)


def _refuse_script_without_guard() -> None:
    """Check that no script starts a gang while `multiprocessing` imports the script in a spawned process.

    Raises:
        RuntimeError: The script starts a gang at its import, so each spawned process would train, too.
    """
    main = sys.modules["__main__"]
    # During the import `__main__` is `multiprocessing`'s own program. Afterwards both names have the same module.
    if sys.modules.get("__mp_main__", main) is not main and not hasattr(main, "__file__"):
        raise RuntimeError(
            "the script starts a gang while another process of the same script imports it. Start the gang below "
            "`if __name__ == '__main__':`"
        )


@contextlib.contextmanager
def _open_hand_over() -> Iterator[list[int]]:
    """Open the descriptors with which a fork server survives this process: a listening socket and the parent's pidfd.

    A successor of this process connects to the socket. The list is empty without a hand-over, before Linux 5.3, or if
    another process uses the socket's name.
    """
    with contextlib.ExitStack() as stack:
        descriptors: list[int] = []
        if _hand_over is not None:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            with contextlib.suppress(OSError):
                listener.bind(f"\0{_hand_over}")  # an abstract name leaves no file, however the processes end
                listener.listen()
                stack.callback(os.close, parent := os.pidfd_open(os.getppid()))
                descriptors += [listener.fileno(), parent]
        yield descriptors
