"""A process with torch imported that forks ranks in milliseconds. Runs beside a Dask worker; never touches CUDA.

Why not `multiprocessing`'s fork server: it refuses to start children from a Dask worker under a nanny (which is
daemonic), imports the parent's `__main__` into every child, and leaves ranks alive when their parent is killed.

    owner process ──control socket──▶ fork server: a new client socket per agent; end-of-file ends the server, unless
                                                   another owner may come
    agent         ──client socket───▶ fork server: spawn and kill requests; exits come back; end-of-file kills the
                                                   client's ranks, which are fresh interpreters where it asked for that
    next owner    ──hand-over socket▶ fork server: becomes the owner, as the worker that a Dask nanny has started in the
                                                   place of a killed one
    fork server   ──forks, once it has started ranks──▶ its successor, which imports what training needs besides, makes
                                                   itself cheap to fork, takes over the control socket, and so starts
                                                   later ranks warmer; once its own are gone the first only waits for it
All sockets are Unix SOCK_SEQPACKET, so a message is one packet; and only that of the hand-over has a name.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection
from typing import NoReturn

from flytekitplugins.daskpytorch.node import hugepages
from flytekitplugins.daskpytorch.node.fork_wire import AHEAD, END, MAX_PACKET, SPAWN, _is_of_this_user, _python
from flytekitplugins.daskpytorch.process import sigterm

__all__ = []

SUCCESSION_DELAY = 3.0
"""Seconds from the first rank to the successor's imports, so that they do not slow the gang's start."""
HAND_OVER_PATIENCE = 60.0
"""Seconds from the owner's death to that of a fork server that no other owner has come for."""
PR_SET_PDEATHSIG = 1
"""From linux/prctl.h: the signal a process gets when the thread that made it ends."""


# ---- The server process ---------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Client:
    sock: socket.socket
    spawns: bool
    """Its ranks are fresh interpreters."""
    ranks: dict[int, int] = field(default_factory=dict)
    """key -> pid"""


@dataclass(frozen=True)
class _HandOver:
    """What a server needs to survive its owner."""

    listener: socket.socket
    """Where the next owner asks for it."""
    parent: int
    """A file descriptor that becomes readable when the owner's parent ends: there will be no next owner."""

    def close(self) -> None:
        self.listener.close()
        os.close(self.parent)


class _Server:
    """One thread, so that PR_SET_PDEATHSIG in the ranks means the death of this process."""

    def __init__(
        self,
        control: socket.socket | None,
        hand_over: _HandOver | None,
        imported_ahead: Sequence[str],
        predecessor: socket.socket | None = None,
    ) -> None:
        self._control = control
        """None while the next owner is waited for."""
        self._hand_over = hand_over
        self._imported_ahead = imported_ahead
        """What its ranks need besides what every rank needs."""
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
        if hand_over is not None:
            self._selector.register(hand_over.listener, selectors.EVENT_READ, self._welcome_next_owner)
            self._selector.register(hand_over.parent, selectors.EVENT_READ, self._end)
        self._needs_successor = predecessor is None
        self._has_successor = False
        """It has taken over the control socket."""
        self._succeed_at: float | None = None

    def serve(self) -> None:
        """Until the owner says so, or dies and nobody takes over."""
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
        """Serve the owner at this end of its socket, or nobody until the next owner comes."""
        self._control = control
        if control is None:
            self._end_at = time.monotonic() + HAND_OVER_PATIENCE
        else:
            self._end_at = None
            self._selector.register(control, selectors.EVENT_READ, functools.partial(self._accept, control))

    def _leave_owner(self) -> None:
        if self._control is not None:
            self._selector.unregister(self._control)
            self._control.close()
            self._control = None

    def _welcome_next_owner(self) -> None:
        if self._hand_over is None:  # the successor has it
            return
        next_owner, _ = self._hand_over.listener.accept()
        if not _is_of_this_user(next_owner):
            next_owner.close()
            return
        self._leave_owner()  # who may be dead already, and its socket kept open by a child of its own
        self._obey(next_owner)

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
                _Server(control, self._hand_over, self._imported_ahead, predecessor=theirs).serve()
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
            if self._hand_over is not None:
                for end in (self._hand_over.listener, self._hand_over.parent):
                    self._selector.unregister(end)
                self._hand_over.close()
                self._hand_over = None
            self._has_successor = True
        elif self._has_successor:  # it ended with the owner, or was killed: nobody hears the owner any more
            self._running = False
        else:  # it did not come to that: this one goes on as it is
            self._selector.unregister(successor)

    def _accept(self, control: socket.socket) -> None:
        if control is not self._control:  # the next owner came in the same moment, or the successor
            return
        try:
            packet, descriptors, _, _ = socket.recv_fds(control, MAX_PACKET, 1)
        except ConnectionResetError:
            packet, descriptors = b"", []
        if packet == END or (not packet and self._hand_over is None):
            self._end()
            return
        if not packet:
            self._leave_owner()
            self._obey(None)
            return
        if packet == AHEAD:
            if self._needs_successor:
                _import_for_ranks(self._imported_ahead)
                self._needs_successor, self._succeed_at = False, time.monotonic()
            return
        client = _Client(socket.socket(fileno=descriptors[0]), spawns=packet == SPAWN)
        if not client.spawns:
            _import_for_ranks(self._imported_ahead)
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
        if self._hand_over is not None:
            self._hand_over.close()
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


def _be_rank(channel: int) -> NoReturn:
    status = 1
    try:
        sigterm.leave_to_parent()
        from flytekitplugins.daskpytorch.rank import main as rank_main

        status = rank_main.main(Connection(channel))
    except BaseException:
        traceback.print_exc()
    finally:
        # Not sys.exit: threads of CUDA or NCCL that hang at exit must not keep a finished rank alive.
        os._exit(status)


def _import_for_ranks(others: Sequence[str]) -> None:
    """Import what every rank needs, and these modules."""
    gc.disable()
    import torch.distributed  # noqa: F401

    from flytekitplugins.daskpytorch.rank import main as rank_main

    for name in others:
        import_module(name)
    rank_main.installed_backends()
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


def main() -> None:
    """Serve the owner of the socket whose descriptor is the first argument; two more are the hand-over's.

    Other arguments name modules to import ahead.
    """
    gc.enable()
    control, *hand_over = (int(argument) for argument in sys.argv[1:] if argument.isdecimal())
    for descriptor in (control, *hand_over):
        os.set_inheritable(descriptor, False)
    left = _HandOver(socket.socket(fileno=hand_over[0]), hand_over[1]) if hand_over else None
    imported_ahead = [argument for argument in sys.argv[1:] if not argument.isdecimal()]
    _Server(socket.socket(fileno=control), left, imported_ahead).serve()


def main_of_spawned_rank() -> None:
    """Be a rank whose channel's descriptor is the argument."""
    gc.enable()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _be_rank(int(sys.argv[1]))
