"""The fork server: a process with torch imported that forks ranks in milliseconds, and never touches CUDA.

`multiprocessing`'s fork server does not fit: it cannot start below a nanny, whose Dask worker is daemonic, and its
children import the parent's `__main__`, and survive a kill of their parent.

    owner (worker, task) ──control socket──▶ fork server: a new client socket per agent; end-of-file ends the server
    agent                ──client socket───▶ fork server: spawn and kill requests; exits come back; end-of-file
                                                          kills the client's ranks
    agent                ──rank's channel──▶ rank:        its environment, for which a fork may have to become a
                                                          fresh interpreter; then orders, and reports come back

All sockets are Unix SOCK_SEQPACKET without a name, so each message is one packet.
"""

import contextlib
import ctypes
import functools
import gc
import json
import mmap
import multiprocessing
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module, metadata
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from wrapt import register_post_import_hook

from flytekitplugins.daskpytorch.process import ending
from flytekitplugins.daskpytorch.process.system import kill_session, needs_fresh_interpreter, optional

MAX_PACKET = 4096
CLIENT = b"client"
SPAWN = 0
"""Asks for a new rank, where other requests have the signal for a rank."""
# Other plugins' .pth files create the namespace package `flytekitplugins` at the interpreter's start, from the folders
# known by then. An editable installation of this package may be missing there, hence the pop.
BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); "
    # flytekitplugins-dask fixes this namespace's search path before sys.path is set.
    "sys.modules.pop('flytekitplugins', None); from flytekitplugins.daskpytorch.node.fork_server import {0}; {0}()"
)
PR_SET_PDEATHSIG = 1


def command(main: str, arguments: Sequence[int | str], path: list[str]) -> list[str]:
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined] # noqa: SLF001 - as multiprocessing
    return [sys.executable, *flags, "-P", "-c", BOOTSTRAP.format(main), *map(str, arguments), json.dumps(path)]


# ---- The server process ---------------------------------------------------------------------------------------------


class _Server:
    """One thread makes all forks, so PR_SET_PDEATHSIG kills the ranks only at the end of the whole fork server."""

    def __init__(self, control: socket.socket, imported_ahead: Sequence[str]) -> None:
        self._control = control
        self._imported_ahead = imported_ahead
        self._started_with = dict(os.environ)
        self._prctl = ctypes.CDLL(None).prctl  # looked up once, for all ranks
        self._clients: dict[socket.socket, dict[int, int]] = {}
        """Connection -> its ranks by key, each with its process ID."""
        self._selector = selectors.DefaultSelector()
        self._wakeup, wakeup_write = os.pipe()
        os.set_blocking(wakeup_write, False)
        signal.set_wakeup_fd(wakeup_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # makes Python write to the wake-up pipe
        for signum in (signal.SIGINT, signal.SIGTERM):  # the driver or the worker handles them
            signal.signal(signum, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # ranks inherit the mask (see `rank.main.main`)
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._reap)
        self._selector.register(control, selectors.EVENT_READ, self._accept)
        self._running = True
        self._has_imports = False
        self._leisure = Leisure()

    def serve(self) -> None:
        while self._running:
            has_ranks = any(self._clients.values())
            requests = self._selector.select(0.0 if self._leisure.is_due(has_ranks=has_ranks) else None)
            for key, _ in requests:
                key.data()
            if not requests:
                self._leisure.import_next()
        for client in list(self._clients):
            self._drop(client)

    def _accept(self) -> None:
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._control, MAX_PACKET, 1)
        except ConnectionResetError:
            packet, descriptors = b"", []
        if packet != CLIENT:
            self._running = False
            return
        client = socket.socket(fileno=descriptors[0])
        self._clients[client] = {}
        self._selector.register(client, selectors.EVENT_READ, functools.partial(self._serve_client, client))
        if not self._has_imports:
            import_for_ranks(self._imported_ahead)
            self._has_imports = True
        self._tell(client)  # the client may wait for the imports

    def _serve_client(self, client: socket.socket) -> None:
        try:
            packet, descriptors, _, _ = socket.recv_fds(client, MAX_PACKET, 2)
        except ConnectionResetError:  # the client closed the connection with exits unread
            packet, descriptors = b"", []
        if not packet:
            self._drop(client)
            return
        key, signum = json.loads(packet)
        if signum == SPAWN:
            self._spawn(client, key, descriptors)
        elif (pid := self._clients[client].get(key)) is not None:  # else the rank has ended
            kill_session(pid, signum)

    def _spawn(self, client: socket.socket, key: int, descriptors: Sequence[int]) -> None:
        server_pid = os.getpid()
        pid = self._clients[client][key] = os.fork()
        if not pid:
            self._run_rank(server_pid, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)

    # ---- ranks

    def _drop(self, client: socket.socket) -> None:
        self._selector.unregister(client)
        client.close()
        for pid in self._clients.pop(client).values():
            kill_session(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _reap(self) -> None:
        os.read(self._wakeup, 1024)
        for client, ranks in self._clients.items():
            for key, pid in list(ranks.items()):
                # WNOWAIT keeps the process ID taken until the rank's children, such as DataLoader workers, are killed.
                if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                    continue
                kill_session(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
                del ranks[key]
                self._tell(client, key, os.waitstatus_to_exitcode(status))

    @staticmethod
    def _tell(client: socket.socket, *event: int) -> None:
        with contextlib.suppress(OSError):  # the agent has ended, and the end-of-file that follows drops the client
            client.send(json.dumps(event).encode())

    def _run_rank(self, server_pid: int, channel: int, output: int) -> NoReturn:
        try:
            self._become_rank(server_pid, output)
            seed_anew()
            self._leisure.watch_for_training()
            to_agent = Connection(channel)
            environment = to_agent.recv()
            if needs_fresh_interpreter(self._started_with, environment):
                os.set_inheritable(channel, True)
                fresh = command("main_of_fresh_rank", [channel], sys.path)
                os.execve(sys.executable, fresh, environment)  # noqa: S606
            set_environment(environment)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        _be_rank(to_agent)

    def _become_rank(self, server_pid: int, output: int) -> None:
        os.setsid()
        self._prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # at the server's end, also after `exec` of another program
        if os.getppid() != server_pid:  # the server ended before the line above
            os._exit(1)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # SIGTERM stays ignored (see `_be_rank`)
        self._selector.close()  # without unregister, since parent and child share the selector
        for end in (self._control, *self._clients):
            end.close()  # else the rank would hide the fork server's end from its owner and agents
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _be_rank(to_agent: Connection) -> NoReturn:
    status = 1
    try:
        ending.leave_sigterm_to_parent()
        from flytekitplugins.daskpytorch.rank import main as rank_main

        status = rank_main.main(to_agent)
    except BaseException:
        traceback.print_exc()
    finally:
        # sys.exit could hang: threads of CUDA or NCCL would keep a finished rank alive.
        os._exit(status)


def main() -> None:
    """Run the fork server. Command line: descriptor of the control socket, then modules to import ahead."""
    control, imported_ahead = int(sys.argv[1]), sys.argv[2:]
    os.set_inheritable(control, False)
    status = 1
    try:
        _Server(socket.socket(fileno=control), imported_ahead).serve()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)  # also in the middle of imports


def main_of_fresh_rank() -> None:
    """Run a rank in a fresh interpreter. Command line: descriptor of the pipe to the agent."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _be_rank(Connection(int(sys.argv[1])))


TRAINS = "torch._dynamo"
TRAINING_IMPORTS = (
    "sympy",
    "torch.fx.experimental.symbolic_shapes",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch._dynamo",
)
"""The first optimizer of a process imports the last one, which imports the others. Without these imports in the fork
server, a warm gang's first step comes 20 times as late (`recovery.py`, rank killed, 2026-11-23). For ranks that do not
train, they would waste two seconds of processor time. Not wandb: its import makes a media folder, which the first rank
to end would remove for all ranks."""

# ---- Inherited modules


@contextlib.contextmanager
def _without_finalizers() -> Iterator[None]:
    """Keep each new `weakref.finalize` of the block from running at the process's exit.

    Torch's finalizers, for objects that end with the process anyway, and entry points that are read with each process
    group would make a model that does nothing cost 1.7 times as much (`many.py`, 2026-11-29).
    """
    begin = weakref.finalize.__init__

    def begin_quietly(finalizer: Any, *args: Any, **kwargs: Any) -> None:
        begin(finalizer, *args, **kwargs)
        finalizer.atexit = False

    weakref.finalize.__init__ = begin_quietly  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        weakref.finalize.__init__ = begin  # type: ignore[method-assign]


@_without_finalizers()
def import_for_ranks(others: Sequence[str]) -> None:
    """Import modules, and call the function of `module:function`.

    Garbage collections during the imports would take 0.15 s of a first gang's two seconds (2026-11-26).
    """
    gc.disable()
    try:
        import torch.distributed
        import torch.utils.data  # noqa: F401

        from flytekitplugins.daskpytorch.rank import main, process_group  # noqa: F401

        process_group.install()
        for name in others:
            with optional(f"Importing {name} ahead"):  # the rank that needs the module reports the error
                module, _, function = name.partition(":")
                imported = import_module(module)
                if function:
                    getattr(imported, function)()
        metadata.entry_points = functools.cache(metadata.entry_points)  # type: ignore[assignment]
        metadata.entry_points(group="torch.distributed.backends")
        _settle()
    finally:
        gc.enable()


class Leisure:
    """Imports modules for training once a rank has trained and none runs, one at a time, with forks between.

    All imports together take seconds, during which no gang could start. Beside running ranks, which import these
    modules themselves, they would take the memory twice: a first gang of four workers would take 1.32 x `torchrun`'s
    memory, not 1.18 x (`memory.py`, 2026-11-26).
    """

    def __init__(self) -> None:
        self._has_trained = mmap.mmap(-1, 1)
        """A byte that ranks share: 1 once a rank has trained."""
        self._names = deque(TRAINING_IMPORTS)

    def is_due(self, *, has_ranks: bool) -> bool:
        return bool(self._names and self._has_trained[0] and not has_ranks)

    @_without_finalizers()
    def import_next(self) -> None:
        with contextlib.suppress(Exception):  # the rank that needs the module reports the error
            import_module(self._names.popleft())
        _settle()

    def watch_for_training(self) -> None:
        register_post_import_hook(lambda _: self._has_trained.__setitem__(0, 1), TRAINS)


def _settle() -> None:
    # Otherwise a rank's first full garbage collection takes 0.33 s, and copies 90 MiB of shared pages (2026-11-23).
    gc.freeze()


# ---- Environment


def set_environment(variables: Mapping[str, str]) -> None:
    """Give this process exactly these variables, also those that Python keeps values of."""
    for name in set(os.environ).difference(variables):
        del os.environ[name]
    for name, value in variables.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    time.tzset()  # reads TZ
    tempfile.tempdir = None  # of TMPDIR, at the next temporary file


# ---- Random generators. A fork inherits its parent's generators. Without new seeds, all ranks of a fork server, and
# all models of a sweep there, would draw the same numbers.


def seed_anew() -> None:
    """Seed torch's and numpy's generators as in a fresh process. Python seeds its own at each fork."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()  # `torch.seed()` would also queue a seed for CUDA
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    multiprocessing.current_process().authkey = os.urandom(32)
