"""A process with torch imported that forks ranks in milliseconds. Runs beside a Dask worker; never touches CUDA.

Why not `multiprocessing`'s fork server: it refuses to start children from a Dask worker under a nanny (which is
daemonic), imports the parent's `__main__` into every child, and leaves ranks alive when their parent is killed.

    owner process ──control socket──▶ fork server: a new client socket per agent; end-of-file ends the server, unless
                                                   an heir may come
    agent         ──client socket───▶ fork server: spawn and kill requests; exits come back; end-of-file kills the
                                                   client's ranks, which are fresh interpreters where it asked for that
    heir          ──legacy socket───▶ fork server: becomes the owner, as the worker that a Dask nanny has started in the
                                                   place of a killed one
    fork server   ──forks, once it has started ranks──▶ its successor, which imports what training needs besides, makes
                                                   itself cheap to fork, takes over the control socket, and so starts
                                                   later ranks warmer; once its own are gone the first only waits for it
All sockets are Unix SOCK_SEQPACKET, so a message is one packet; but for the legacy's, nothing has a name or a port.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import hashlib
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import NoReturn

from flytekitplugins.daskpytorch import hugepages, sigterm

__all__ = ["ForkServerClient", "ForkServerLostError", "bequeath", "connect", "shutdown", "start_ahead"]

MAX_PACKET = 4096
AHEAD = b"ahead"
END = b"end"
SPAWN = b"spawn"
SUCCESSION_DELAY = 3.0
"""Seconds from the first rank to the successor's imports, so that they do not slow the gang's start."""
HEIR_PATIENCE = 60.0
"""Seconds from the owner's death to that of a fork server that no heir has come for."""
# Other plugins' .pth files make the namespace package `flytekitplugins` at the interpreter's start, out of the folders
# known by then; without the pop, an editable installation of this one may not be among them.
BOOTSTRAP = (
    # Without garbage collections the imports take a sixth less time; what is called turns them on again.
    "import gc, json, sys; gc.disable(); sys.path[:] = json.loads(sys.argv.pop()); "
    # flytekitplugins-dask fixes where this namespace is looked for before sys.path is set.
    f"sys.modules.pop('flytekitplugins', None); from {__name__} import {{0}}; {{0}}()"
)
PR_SET_PDEATHSIG = 1
"""From linux/prctl.h: the signal a process gets when the thread that made it ends."""


class ForkServerLostError(ConnectionError):
    """The fork server is gone: it was killed, or the process that owns it is ending."""


class ForkServerClient:
    """An agent's end: starts and kills its own ranks, hears of their exits. Closing it kills what is left of them."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def fileno(self) -> int:
        """For `multiprocessing.connection.wait`."""
        return self._socket.fileno()

    def spawn(self, key: int, channel: int, output: int) -> None:
        """Fork a rank. `key` names it; `channel` and `output` are file descriptors that become the rank's own."""
        socket.send_fds(self._socket, [json.dumps({"op": "spawn", "key": key}).encode()], [channel, output])

    def kill(self, key: int, signum: int) -> None:
        """Signal a rank and everything it started, if it still runs."""
        self._socket.send(json.dumps({"op": "kill", "key": key, "signal": signum}).encode())

    def signal(self, key: int, signum: int) -> None:
        """Signal a rank alone, if it still runs."""
        self._socket.send(json.dumps({"op": "signal", "key": key, "signal": signum}).encode())

    def next_exit(self) -> tuple[int, int]:
        """Wait for a rank's end: its key, and its exit code (negative: the signal that ended it).

        Raises:
            ForkServerLostError: It is gone, and every rank with it.
        """
        try:
            packet = self._socket.recv(MAX_PACKET)
        except ConnectionResetError:  # it ended with requests unread
            packet = b""
        if not packet:
            raise ForkServerLostError("the fork server ended")
        event = json.loads(packet)
        return event["key"], event["exitcode"]

    def close(self) -> None:
        """Kill what is left of this client's ranks."""
        self._socket.close()


@dataclass
class _Owned:
    """The fork server that belongs to this process."""

    pid: int
    """This process's own; in a fork of it the server is not the fork's."""
    process: subprocess.Popen[bytes] | None
    """None: the process before this one has started it."""
    control: socket.socket
    is_for_tasks: bool

    def has_ended(self) -> bool:
        """Whether the server is gone; the control socket may tell a little late, if its successor was being forked."""
        if self.process is not None and self.process.poll() is not None:
            return True
        return bool(wait([self.control], 0))  # it says nothing, so that is its end


_owned: _Owned | None = None
_legacy: str | None = None
"""The name of the socket by which an heir finds the server."""
_lock = threading.Lock()


def connect(start_method: str = "forkserver") -> ForkServerClient:
    """A new client of this process's fork server, which is started if it does not run.

    Takes milliseconds when it runs; the first rank waits for the imports otherwise.

    Args:
        start_method: `forkserver`, or `spawn`: its ranks are to be fresh interpreters, which import everything anew.
    """
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, _lock:
        socket.send_fds(_running().control, [start_method.encode()], [theirs.fileno()])
    return ForkServerClient(mine)


def start_ahead() -> None:
    """Start this process's fork server, with all that the ranks of Flyte tasks will need, while nobody waits for it."""
    with _lock:
        _running(is_for_tasks=True).control.send(AHEAD)


def bequeath(key: str) -> None:
    """Let this process's fork server survive it, should it be killed, for the one that its parent starts in its place.

    The heir finds the server, with its imports done, by calling this with the same key. Where none comes the server
    ends after a minute; it ends at once with the parent, and with this process where that ends in good order.

    Args:
        key: The same for both processes, and not for others of the same parent.
    """
    global _legacy
    with _lock:
        _legacy = f"daskpytorch-{hashlib.sha256(f'{os.getppid()} {key}'.encode()).hexdigest()}"


def shutdown() -> None:
    """End this process's fork server and every rank it started; a later `connect` starts a new one."""
    global _owned
    with _lock:
        if _owned is not None and _owned.pid == os.getpid():
            with _owned.control, contextlib.suppress(OSError):  # it may have ended
                _owned.control.send(END)
                _owned.control.recv(1)  # until it has
            if _owned.process is not None:
                _owned.process.wait()
        _owned = None


@atexit.register
def _shutdown_at_exit() -> None:
    with contextlib.suppress(KeyboardInterrupt, SystemExit):  # at a second Ctrl-C it ends without being waited for
        shutdown()


def _running(*, is_for_tasks: bool = False) -> _Owned:
    """This process's fork server, which is started if it does not run. To be called with the lock held."""
    global _owned
    if _owned is None or _owned.pid != os.getpid() or _owned.has_ended():
        # Where nobody has imported flytekit the ranks will hardly need it, and it takes a second.
        is_for_tasks |= "flytekit" in sys.modules or (_owned is not None and _owned.is_for_tasks)
        control = _inherit()
        _owned = _Owned(os.getpid(), None, control, is_for_tasks) if control else _start(is_for_tasks=is_for_tasks)
    return _owned


def _inherit() -> socket.socket | None:
    """The way to the fork server of the process before this one."""
    if _legacy is None:
        return None
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.suppress(OSError):  # there is none
        control.connect(f"\0{_legacy}")
        if _is_of_this_user(control):
            return control
    control.close()
    return None


def _start(*, is_for_tasks: bool) -> _Owned:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, _open_legacy() as legacy:
        # Modules are found where this process finds them; the user's own come with each gang, before all these.
        path = [str(entry) for entry in sys.path if entry]
        descriptors = [theirs.fileno(), *legacy]
        command = _python("main_for_tasks" if is_for_tasks else "main", descriptors, path)
        # A Dask nanny has its worker's freed memory given back at once, which costs a training thousands of page faults
        # per step. The C library reads it when a process starts, so the ranks could not undo it themselves.
        env = {name: value for name, value in os.environ.items() if name != "MALLOC_TRIM_THRESHOLD_"}
        with sigterm.held_back():
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=descriptors, start_new_session=True, env=env
            )
    return _Owned(os.getpid(), process, mine, is_for_tasks)


@contextlib.contextmanager
def _open_legacy() -> Iterator[list[int]]:
    """What the server needs to survive this process: a listening socket for the heir, and the parent's life to watch.

    Empty where it is not to survive, and where it cannot: before Linux 5.3, or while another has the socket's name.
    """
    with contextlib.ExitStack() as stack:
        descriptors: list[int] = []
        if _legacy is not None:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            with contextlib.suppress(OSError):
                listener.bind(f"\0{_legacy}")  # an abstract name: no file is left, however all this ends
                listener.listen()
                stack.callback(os.close, parent := os.pidfd_open(os.getppid()))
                descriptors += [listener.fileno(), parent]
        yield descriptors


def _is_of_this_user(sock: socket.socket) -> bool:
    """Whether the process at the other end is; an abstract name has no permissions, as a file would."""
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return bool(uid == os.getuid())


# ---- The server process ---------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Client:
    sock: socket.socket
    spawns: bool
    """Its ranks are fresh interpreters."""
    ranks: dict[int, int] = field(default_factory=dict)
    """key -> pid"""


@dataclass(frozen=True)
class _Legacy:
    """What a server needs to survive its owner."""

    listener: socket.socket
    """Where the heir asks for it."""
    parent: int
    """A file descriptor that becomes readable when the owner's parent ends: there will be no heir."""

    def close(self) -> None:
        self.listener.close()
        os.close(self.parent)


class _Server:
    """One thread, so that PR_SET_PDEATHSIG in the ranks means the death of this process."""

    def __init__(
        self,
        control: socket.socket | None,
        legacy: _Legacy | None,
        predecessor: socket.socket | None = None,
        *,
        is_for_tasks: bool,
    ) -> None:
        self._control = control
        """None while an heir is waited for."""
        self._legacy = legacy
        self._is_for_tasks = is_for_tasks
        """Its ranks are those of Flyte tasks."""
        self._relative = predecessor
        """The link to the predecessor, or to the successor: its end is that of the other."""
        self._clients: set[_Client] = set()
        self._selector = selectors.DefaultSelector()
        self._wakeup, wakeup_write = os.pipe()
        os.set_blocking(wakeup_write, False)
        signal.set_wakeup_fd(wakeup_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # the byte on the wake-up pipe is what counts
        for signum in (signal.SIGINT, signal.SIGTERM):  # the driver's to handle, or the worker's
            signal.signal(signum, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._reap)
        self._running = True
        self._end_at: float | None = None
        self._obey(control)
        if legacy is not None:
            self._selector.register(legacy.listener, selectors.EVENT_READ, self._welcome_heir)
            self._selector.register(legacy.parent, selectors.EVENT_READ, self._end)
        self._needs_successor = predecessor is None
        self._has_successor = False
        """It has taken over the control socket."""
        self._succeed_at: float | None = None

    def serve(self) -> None:
        """Until the owner says so, or dies without an heir."""
        while self._running:
            for key, _ in self._selector.select(self._patience()):
                if isinstance(key.data, _Client):
                    self._serve_client(key.data)
                else:
                    key.data()
            if self._succeed_at is not None and time.monotonic() >= self._succeed_at:
                self._succeed_at = None
                self._start_successor()
            if self._end_at is not None and time.monotonic() >= self._end_at:
                self._end()
            if self._has_successor and not self._clients and self._relative is not None:
                _wait_for(self._relative)
        for client in list(self._clients):
            self._drop(client)

    def _patience(self) -> float | None:
        due = [at for at in (self._succeed_at, self._end_at) if at is not None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _end(self) -> None:
        self._running = False

    # ---- the owner

    def _obey(self, control: socket.socket | None) -> None:
        """Serve the owner at this end of its socket, or nobody until the heir comes."""
        self._control = control
        if control is None:
            self._end_at = time.monotonic() + HEIR_PATIENCE
        else:
            self._end_at = None
            self._selector.register(control, selectors.EVENT_READ, functools.partial(self._accept, control))

    def _leave_owner(self) -> None:
        if self._control is not None:
            self._selector.unregister(self._control)
            self._control.close()
            self._control = None

    def _welcome_heir(self) -> None:
        if self._legacy is None:  # the successor has it
            return
        heir, _ = self._legacy.listener.accept()
        if not _is_of_this_user(heir):
            heir.close()
            return
        self._leave_owner()  # who may be dead already, and its socket kept open by a child of its own
        self._obey(heir)

    # ---- the successor

    def _start_successor(self) -> None:
        """Fork the process that starts later ranks; the imports would keep this one from hearing of exits."""
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        server_pid = os.getpid()
        if os.fork():
            theirs.close()
            self._relative = mine
            self._selector.register(mine, selectors.EVENT_READ, functools.partial(self._follow_successor, mine))
            return
        try:
            mine.close()
            _die_with(server_pid)
            self._close_inherited()
            os.close(self._wakeup)
            _import_for_training()
            theirs.send(b"ready")
            packet, descriptors, _, _ = socket.recv_fds(theirs, MAX_PACKET, 1)
            if packet:
                control = socket.socket(fileno=descriptors[0]) if descriptors else None
                _Server(control, self._legacy, predecessor=theirs, is_for_tasks=self._is_for_tasks).serve()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)

    def _follow_successor(self, successor: socket.socket) -> None:
        packet = b""
        with contextlib.suppress(ConnectionResetError):
            packet = successor.recv(MAX_PACKET)
        if packet:
            socket.send_fds(successor, [b"."], [] if self._control is None else [self._control.fileno()])
            self._leave_owner()
            self._end_at = None
            if self._legacy is not None:
                for end in (self._legacy.listener, self._legacy.parent):
                    self._selector.unregister(end)
                self._legacy.close()
                self._legacy = None
            self._has_successor = True
        elif self._has_successor:  # it ended with the owner, or was killed: nobody hears the owner any more
            self._running = False
        else:  # it did not come to that: this one goes on as it is
            self._selector.unregister(successor)

    def _accept(self, control: socket.socket) -> None:
        if control is not self._control:  # the heir came in the same moment, or the successor
            return
        try:
            packet, descriptors, _, _ = socket.recv_fds(control, MAX_PACKET, 1)
        except ConnectionResetError:
            packet, descriptors = b"", []
        if packet == END or (not packet and self._legacy is None):
            self._end()
            return
        if not packet:
            self._leave_owner()
            self._obey(None)
            return
        if packet == AHEAD:
            if self._needs_successor:
                _import_for_ranks(is_for_tasks=self._is_for_tasks)
                self._needs_successor, self._succeed_at = False, time.monotonic()
            return
        client = _Client(socket.socket(fileno=descriptors[0]), spawns=packet == SPAWN)
        if not client.spawns:
            _import_for_ranks(is_for_tasks=self._is_for_tasks)
        self._clients.add(client)
        self._selector.register(client.sock, selectors.EVENT_READ, client)

    def _serve_client(self, client: _Client) -> None:
        try:
            packet, descriptors, _, _ = socket.recv_fds(client.sock, MAX_PACKET, 2)
        except ConnectionResetError:  # it closed with exits unread
            packet, descriptors = b"", []
        if not packet:
            self._drop(client)
            return
        request = json.loads(packet)
        if request["op"] == "spawn":
            client.ranks[request["key"]] = self._fork(*descriptors, spawns=client.spawns)
            if self._needs_successor and not client.spawns:
                self._needs_successor = False
                self._succeed_at = time.monotonic() + SUCCESSION_DELAY
            for descriptor in descriptors:
                os.close(descriptor)
        elif (pid := client.ranks.get(request["key"])) is None:
            return  # it has ended
        elif request["op"] == "signal":
            os.kill(pid, request["signal"])  # it is not reaped yet, so the number is still its own
        else:
            _kill_session(pid, request["signal"])

    def _drop(self, client: _Client) -> None:
        self._clients.discard(client)
        self._selector.unregister(client.sock)
        client.sock.close()
        for pid in client.ranks.values():
            _kill_session(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _reap(self) -> None:
        os.read(self._wakeup, 1024)
        for client in list(self._clients):
            for key, pid in list(client.ranks.items()):
                # WNOWAIT keeps the pid taken until its leftovers (DataLoader workers, say) are killed.
                if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                    continue
                _kill_session(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
                del client.ranks[key]
                self._tell(client, {"key": key, "exitcode": os.waitstatus_to_exitcode(status)})

    @staticmethod
    def _tell(client: _Client, event: dict[str, int]) -> None:
        try:
            client.sock.send(json.dumps(event).encode())
        except OSError:  # the agent has gone; the end-of-file that follows drops it
            return

    def _fork(self, channel: int, output: int, *, spawns: bool) -> int:
        server_pid = os.getpid()
        pid = os.fork()
        if not pid:
            self._run_rank(server_pid, channel, output, spawns=spawns)
        return pid

    def _run_rank(self, server_pid: int, channel: int, output: int, *, spawns: bool) -> NoReturn:
        try:
            self._become_rank(server_pid, channel, output)
            if spawns:
                os.set_inheritable(channel, True)
                os.execv(sys.executable, _python("main_of_spawned_rank", [channel], sys.path))  # noqa: S606
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        _be_rank(channel)

    def _close_inherited(self) -> None:
        """Close what is the server's: held by a child, it would hide the server's end, or a sibling's, from others."""
        self._selector.close()  # not unregister, since parent and child share it
        for sock in (self._control, self._relative, *(client.sock for client in self._clients)):
            if sock is not None:
                sock.close()

    def _become_rank(self, server_pid: int, channel: int, output: int) -> None:
        os.setsid()
        _die_with(server_pid)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # SIGTERM stays ignored; see `_be_rank`
        self._close_inherited()
        if self._legacy is not None:
            self._legacy.close()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _wait_for(successor: socket.socket) -> NoReturn:
    """Give the memory back: become a small program that ends with the successor, whose parent this process stays."""
    successor.set_inheritable(True)
    program = "import socket, sys; socket.socket(fileno=int(sys.argv[1])).recv(1)"
    name_for_ps = __name__
    os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", program, str(successor.fileno()), name_for_ps])  # noqa: S606


def _die_with(parent: int) -> None:
    """Have the kernel end this process with its parent, also once it runs another program."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def _python(main: str, descriptors: Sequence[int], path: list[str]) -> list[str]:
    """The command of a fresh interpreter that calls one of this module's main functions."""
    return [sys.executable, "-P", "-c", BOOTSTRAP.format(main), *map(str, descriptors), json.dumps(path)]


def _be_rank(channel: int) -> NoReturn:
    status = 1
    try:
        sigterm.leave_to_parent()
        from flytekitplugins.daskpytorch import rank

        status = rank.main(Connection(channel))
    except BaseException:
        traceback.print_exc()
    finally:
        # Not sys.exit: threads of CUDA or NCCL that hang at exit must not keep a finished rank alive.
        os._exit(status)


def _import_for_ranks(*, is_for_tasks: bool) -> None:
    """Import what every rank needs."""
    gc.disable()
    import torch.distributed  # noqa: F401

    from flytekitplugins.daskpytorch import loaders, rank  # noqa: F401

    if is_for_tasks:
        from flytekitplugins.daskpytorch import flyte  # noqa: F401
    rank.installed_backends()
    _settle()
    gc.enable()


def _import_for_training() -> None:
    """Import what the first optimizer would (3 s).

    Not wandb: it makes a folder for media when it is imported, which the first rank to end would remove for all others.
    """
    import torch._dynamo  # noqa: F401

    gc.collect()
    _settle()
    hugepages.collapse_memory()


def _settle() -> None:
    """Make what was imported cheap to inherit."""
    gc.freeze()  # keeps the ranks' collectors from copying the shared pages
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined] # noqa: SLF001
        finalizer.atexit = False  # torch's own take a rank 50 ms when it ends, and undo what ends anyway


def _kill_session(pid: int, signum: int) -> None:
    for kill, target in ((os.killpg, pid), (os.kill, pid)):  # the second: it has not called setsid yet
        try:
            kill(target, signum)
        except ProcessLookupError:
            continue
        return


def main(*, is_for_tasks: bool = False) -> None:
    """Serve the owner of the socket whose descriptor is the first argument; two more are its legacy's."""
    gc.enable()
    control, *legacy = map(int, sys.argv[1:])
    for descriptor in (control, *legacy):
        os.set_inheritable(descriptor, False)
    left = _Legacy(socket.socket(fileno=legacy[0]), legacy[1]) if legacy else None
    _Server(socket.socket(fileno=control), left, is_for_tasks=is_for_tasks).serve()


def main_for_tasks() -> None:
    """The same for ranks of Flyte tasks."""
    main(is_for_tasks=True)


def main_of_spawned_rank() -> None:
    """Be a rank whose channel's descriptor is the argument."""
    gc.enable()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _be_rank(int(sys.argv[1]))
