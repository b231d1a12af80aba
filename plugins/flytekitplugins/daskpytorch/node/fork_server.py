"""A process with torch imported that forks ranks in milliseconds. Runs beside a Dask worker; never touches CUDA.

Why not `multiprocessing`'s fork server: it refuses to start children from a Dask worker under a nanny (which is
daemonic), imports the parent's `__main__` into every child, and leaves ranks alive when their parent is killed.

    owner process ──control socket──▶ fork server: a new client socket per agent; end-of-file ends the server, unless
                                                   another owner may come
    agent         ──client socket───▶ fork server: spawn and kill requests; exits come back; end-of-file kills the
                                                   client's ranks, which are fresh interpreters where it asked for that
    next owner    ──hand-over socket▶ fork server: becomes the owner, as the worker that a Dask nanny has started in the
                                                   place of a killed one
All sockets are Unix SOCK_SEQPACKET, so a message is one packet; and only that of the hand-over has a name.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import itertools
import json
import logging
import os
import selectors
import signal
import socket
import struct
import sys
import time
import traceback
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module, metadata
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from flytekitplugins.daskpytorch.node import generators, hugepages
from flytekitplugins.daskpytorch.process import sigterm
from flytekitplugins.daskpytorch.process.system import optional

MAX_PACKET = 4096
END = b"end"
SPAWN = b"spawn"
# Other plugins' .pth files make the namespace package `flytekitplugins` at the interpreter's start, out of the folders
# known by then; without the pop, an editable installation of this one may not be among them.
BOOTSTRAP = (
    # Without garbage collections the imports take a sixth less time; what is called turns them on again.
    "import gc, json, sys; gc.disable(); sys.path[:] = json.loads(sys.argv.pop()); "
    # flytekitplugins-dask fixes where this namespace is looked for before sys.path is set.
    "sys.modules.pop('flytekitplugins', None); from flytekitplugins.daskpytorch.node.fork_server import {0}; {0}()"
)
TRAINS = "torch._dynamo"
"""What every optimizer imports, and no rank that does not train. After the first one its server does so, too: where
nobody trains that would take two seconds of processor time in vain, and some of the next gangs would wait for it."""
TRAINING_IMPORTS = (
    "sympy",
    "torch.fx.experimental.symbolic_shapes",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch._dynamo",
)
"""What an optimizer imports is the last; the others are what that takes most of its time for, in pieces that can be
imported alone."""
QUIET = 1.0
"""Seconds after a rank was forked until the next piece: ranks seldom come alone, and their own start comes first."""
HAND_OVER_PATIENCE = 60.0
"""Seconds from the owner's death to that of a fork server that no other owner has come for."""
PR_SET_PDEATHSIG = 1
"""From linux/prctl.h: the signal a process gets when the thread that made it ends."""


# ---- What it shares with those who ask it for ranks -----------------------------------------------------------------


def is_of_this_user(sock: socket.socket) -> bool:
    """Whether the process at the other end is; an abstract name has no permissions, as a file would."""
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return bool(uid == os.getuid())


def command(main: str, arguments: Sequence[int | str], path: list[str]) -> list[str]:
    """The command of a fresh interpreter that calls one of the main functions of `fork_server`."""
    return [sys.executable, "-P", "-c", BOOTSTRAP.format(main), *map(str, arguments), json.dumps(path)]


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
    """All forks come from one thread, so that PR_SET_PDEATHSIG in the ranks means the death of this process."""

    def __init__(self, control: socket.socket, hand_over: _HandOver | None, imported_ahead: Sequence[str]) -> None:
        self._hand_over = hand_over
        self._imported_ahead = imported_ahead
        """What its ranks need besides what every rank needs."""
        self._prctl = ctypes.CDLL(None).prctl  # looked up once, for all ranks
        self._clients: set[_Client] = set()
        self._selector = selectors.DefaultSelector()
        self._wakeup, wakeup_write = os.pipe()
        os.set_blocking(wakeup_write, False)
        signal.set_wakeup_fd(wakeup_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # the byte on the wake-up pipe is what counts
        for signum in (signal.SIGINT, signal.SIGTERM):  # the driver's to handle, or the worker's
            signal.signal(signum, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # ranks inherit the mask; see `rank.main.main`
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._reap)
        self._running = True
        self._end_at: float | None = None
        self._obey(control)
        if hand_over is not None:
            welcome = functools.partial(self._welcome_next_owner, hand_over.listener)
            self._selector.register(hand_over.listener, selectors.EVENT_READ, welcome)
            self._selector.register(hand_over.parent, selectors.EVENT_READ, self._end)
        self._has_imports = False
        """It can fork ranks; what only training needs comes later, piece by piece, and between two it serves."""
        self._has_forked = False
        self._import_at: float | None = None
        """When the next piece is due."""
        self._pieces = self._use_leisure()
        self._trains, self._says_that_it_trains = os.pipe()
        self._selector.register(self._trains, selectors.EVENT_READ, self._prepare_for_training)
        self._is_prepared = False
        """A rank has trained."""

    def serve(self) -> None:
        """Until the owner says so, or dies and nobody takes over."""
        while self._running:
            requests = self._selector.select(self._patience())
            for key, _ in requests:
                if isinstance(key.data, _Client):
                    self._serve_client(key.data)
                else:
                    key.data()
            if not requests and self._import_at is not None and time.monotonic() >= self._import_at:
                self._import_at = next(self._pieces, None)
            if self._end_at is not None and time.monotonic() >= self._end_at:
                self._end()
        for client in list(self._clients):
            self._drop(client)

    def _patience(self) -> float | None:
        due = [at for at in (self._import_at, self._end_at) if at is not None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _end(self) -> None:
        self._running = False

    # ---- the owner

    def _obey(self, control: socket.socket | None) -> None:
        """Serve the owner at this end of its socket, or nobody (None) until the next owner comes."""
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

    def _welcome_next_owner(self, listener: socket.socket) -> None:
        next_owner, _ = listener.accept()
        if not is_of_this_user(next_owner):
            next_owner.close()
            return
        self._leave_owner()  # who may be dead already, and its socket kept open by a child of its own
        self._obey(next_owner)

    def _accept(self, control: socket.socket) -> None:
        if control is not self._control:  # the next owner came in the same moment
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
        client = _Client(socket.socket(fileno=descriptors[0]), spawns=packet == SPAWN)
        self._clients.add(client)
        self._selector.register(client.sock, selectors.EVENT_READ, client)
        if not client.spawns and not self._has_imports:
            leisure = _leisure()
            _import_for_ranks(self._imported_ahead)
            self._has_imports, self._import_at = True, time.monotonic() + leisure

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
            self._has_forked = True
            client.ranks[request["key"]] = self._fork(*descriptors, spawns=client.spawns)
            for descriptor in descriptors:
                os.close(descriptor)
            if self._import_at is not None:
                self._import_at = max(self._import_at, time.monotonic() + QUIET)
        elif request["op"] == "answer":
            self._tell(client, {})
        elif request["op"] == "import":
            self._add(_import_in_pieces(request["modules"]))
        elif (pid := client.ranks.get(request["key"])) is None:
            return  # it has ended
        elif request["op"] == "signal":
            os.kill(pid, request["signal"])  # it is not reaped yet, so the number is still its own
        else:
            _kill_session(pid, request["signal"])

    # ---- its leisure

    def _use_leisure(self) -> Iterator[float]:
        """A server that nobody has asked for ranks yet was started ahead, for gangs that train."""
        yield from _collapse_memory() if self._has_forked else _import_for_training()

    def _prepare_for_training(self) -> None:
        os.read(self._trains, 1024)
        if not self._is_prepared:
            self._is_prepared = True
            self._add(_import_for_training())

    def _add(self, pieces: Iterator[float]) -> None:
        self._pieces = itertools.chain(self._pieces, pieces)
        self._import_at = self._import_at or time.monotonic() + QUIET

    def _watch_for_training(self) -> None:
        """In a rank: have its server hear of it."""
        from flytekitplugins.daskpytorch.rank import imports

        def note(_: object) -> None:
            with contextlib.suppress(OSError):  # the user's code may have closed all files
                os.write(self._says_that_it_trains, b".")

        if TRAINS not in sys.modules:
            imports.call_after(TRAINS, note)

    # ---- ranks

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
    def _tell(client: _Client, event: dict[str, int | str]) -> bool:
        """Send an event, and return whether the client is there."""
        try:
            client.sock.send(json.dumps(event).encode())
        except OSError:  # the agent has gone; the end-of-file that follows drops it
            return False
        return True

    def fail(self, error: BaseException) -> None:
        """Tell all clients why the server ends; print the error where the server has no client."""
        text = "".join(traceback.format_exception_only(error)).strip()[-MAX_PACKET // 4 :]
        if not [client for client in self._clients if self._tell(client, {"error": text})]:
            traceback.print_exception(error)

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
                os.execv(sys.executable, command("main_of_spawned_rank", [channel], sys.path))  # noqa: S606
            generators.seed_anew()
            self._watch_for_training()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        _be_rank(channel)

    def _close_inherited(self) -> None:
        """Close what is the server's: held by a rank, it would hide the server's end, or a sibling's, from others."""
        self._selector.close()  # not unregister, since parent and child share it
        for end in (self._control, self._hand_over, *(client.sock for client in self._clients)):
            if end is not None:
                end.close()
        os.close(self._trains)

    def _die_with(self, parent: int) -> None:
        """Have the kernel end this process with its parent, also once it runs another program."""
        self._prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    def _become_rank(self, server_pid: int, channel: int, output: int) -> None:
        os.setsid()
        self._die_with(server_pid)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # SIGTERM stays ignored; see `_be_rank`
        self._close_inherited()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


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


def _leisure() -> float:
    """Seconds until a server imports what only training needs, or gets cheaper to fork where it has forked ranks.

    Not at once, so that it does not slow the first gang's start.
    """
    text = os.environ.get("DASKPYTORCH_LEISURE", "3")
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"DASKPYTORCH_LEISURE={text!r}: must be a number of seconds, such as 3") from None


def _import_for_ranks(others: Sequence[str]) -> None:
    """Import what every rank needs, and these modules."""
    gc.disable()
    import torch.distributed  # noqa: F401

    from flytekitplugins.daskpytorch.protocol import storages  # noqa: F401
    from flytekitplugins.daskpytorch.rank import host_names, loaders, main, process_group  # noqa: F401

    process_group.install()
    host_names.ask_for_none()
    for name in others:
        with optional(f"Importing {name} ahead"):  # the rank that needs it says so, where it matters
            import_module(name)
    with optional("Reading the metadata of torch's plugins ahead"):
        _remember_plugins()
    _settle()
    gc.enable()


def _remember_plugins() -> None:
    """Keep what is installed for torch in memory.

    With each process group torch asks twice for plugins, and reads the metadata of all that is installed. Kept in
    memory, that takes a fifth off a warm gang's start.
    """
    metadata.entry_points = functools.cache(metadata.entry_points)  # type: ignore[assignment]
    metadata.entry_points(group="torch.distributed.backends")


def _import_for_training() -> Iterator[float]:
    """Import what the first optimizer would: without, a gang whose rank was killed takes 20 times as long to train on.

    Yields when to go on, at once, after each piece: a whole one takes seconds on a busy machine, for which the next
    gang would wait, since a fork in its middle finds modules half imported for ever.

    Not wandb: it makes a folder for media when it is imported, which the first rank to end would remove for all others.
    """
    yield from _import_in_pieces(TRAINING_IMPORTS)
    yield from _collapse_memory()


def _collapse_memory() -> Iterator[float]:
    with optional("Moving memory into huge pages"):
        for _ in hugepages.collapse_memory():
            yield 0.0


def _import_in_pieces(modules: Sequence[str]) -> Iterator[float]:
    from flytekitplugins.daskpytorch.protocol import program

    for name in modules:
        gc.disable()  # a third less time; no rank is forked meanwhile
        with contextlib.suppress(Exception), _no_exit_functions():  # the rank that needs it says so, where it matters
            import_module(name)
        gc.enable()
        program.forget_levels()
        yield 0.0
    gc.collect()
    _settle()


@contextlib.contextmanager
def _no_exit_functions() -> Iterator[None]:
    """Have nothing registered that undoes what ends anyway: triton's takes 3 ms at the end of each rank."""
    register = atexit.register

    def passed_over(function: Any, *args: Any, **kwargs: Any) -> Any:
        is_over = atexit.register is register  # and a module has kept this one by its name
        return register(function, *args, **kwargs) if is_over else function

    atexit.register = passed_over  # type: ignore[assignment]
    try:
        yield
    finally:
        atexit.register = register


def _settle() -> None:
    """Make what was imported cheap to inherit: each page of it that a rank touches, the rank has to copy."""
    from flytekitplugins.daskpytorch.protocol import program

    gc.freeze()  # else a rank's first full collection takes 0.3 s, and copies 90 MiB of the shared pages
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined] # noqa: SLF001
        # torch's own undo what ends anyway; with them a warm gang takes 1.7 times as long to its end.
        finalizer.atexit = False
    # Nor does a rank go through all of them at its end, before it has one of its own, which registers this again.
    atexit.unregister(weakref.finalize._exitfunc)  # type: ignore[attr-defined] # noqa: SLF001
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined] # noqa: SLF001
    _leave_out_handlers_without_buffers()
    program.forget_levels()
    with contextlib.suppress(KeyError, AttributeError):  # it is not there yet, or another torch's
        sys.modules["torch._dynamo"].trace_rules.clear_lru_cache()  # as each process group does


def _leave_out_handlers_without_buffers() -> None:
    """Have `logging` close no handler at a rank's end that has written each record when it came, or none at all."""
    handlers, without = logging._handlerList, (logging.StreamHandler, logging.NullHandler)  # type: ignore[attr-defined] # noqa: SLF001
    handlers[:] = [found for found in handlers if not isinstance(found(), without)]


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
    generators.watch()
    control, *hand_over = (int(argument) for argument in sys.argv[1:] if argument.isdecimal())
    for descriptor in (control, *hand_over):
        os.set_inheritable(descriptor, False)
    left = _HandOver(socket.socket(fileno=hand_over[0]), hand_over[1]) if hand_over else None
    imported_ahead = [argument for argument in sys.argv[1:] if not argument.isdecimal()]
    server = _Server(socket.socket(fileno=control), left, imported_ahead)
    try:
        server.serve()
    except BaseException as error:
        server.fail(error)
        os._exit(1)
    os._exit(0)  # also in the middle of imports


def main_of_spawned_rank() -> None:
    """Be a rank whose channel's descriptor is the argument."""
    gc.enable()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _be_rank(int(sys.argv[1]))
