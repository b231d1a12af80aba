"""A Python that has torch and Dask imported, and runs programs in forks of itself, which spares each of them seconds.

Besides, such a program is what `python program.py` or `python -c ...` is: a process of its own with its own `__main__`,
its own command, and the mark of the test that started it. It imports flytekit itself, and ends as Python ends. A test
starts it cold where Python, torch or Dask read one of its variables when they start.

Fork servers, and the processes that a Dask nanny starts, are such programs, too:

    tests ──▶ warm Python ──▶ program ──▶ its spare ──▶ a fork server
                                                    └──▶ a nanny's worker ──▶ its spare ──▶ a fork server
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from multiprocessing import popen_fork, util
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

MAX_ORDER = 1 << 17
MAX_FILES = 32
MARK = "DASKPYTORCH_TEST_MARK"
"""An environment variable by which a test knows the processes that it caused."""
NO_MARK = "-" * 32
ROOM_FOR_COMMAND = "-" * 1000
IMPORTED = (
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "torchvision",
    "pandas",
    "pytest",
    "hypothesis",
    "distributed.cli.dask_scheduler",
    "distributed.cli.dask_worker",
    "distributed.dashboard.scheduler",
    "distributed.dashboard.worker",
    # What workflows, ranks and drivers import.
    "botocore.session",
    "obstore",
    "s3fs",
    "pydantic.main",  # not wandb, which makes a folder when it is imported that the first program to end would remove
    "sklearn.datasets",
    # What flytekit imports, which takes two thirds of its own import; flytekit itself reads variables.
    "croniter",
    "dataclasses_json",
    "docker",
    "flyteidl.service.admin_pb2_grpc",
    "grpc_status",
    "marshmallow_enum",
    "mashumaro",
    "rich_click",
    # Of the package under test what needs no flytekit, and reads no variable when it is imported.
    "flytekitplugins.daskpytorch.dispatch",
    "flytekitplugins.daskpytorch.node.agent",
    "flytekitplugins.daskpytorch.rank.main",
)
"""What takes long, and reads no variable that a test sets."""


class Program:
    """One that runs; of `subprocess.Popen` what the tests, the package under test and multiprocessing need."""

    def __init__(self, keeper: socket.socket) -> None:
        self._keeper = keeper
        self.pid = int(keeper.recv(32))
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Until it has ended; its exit code."""
        if self.returncode is None:
            if not select.select([self._keeper], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a program", timeout or 0)
            self.returncode = self._heard(socket.MSG_PEEK)  # another thread may wait, too
        return self.returncode

    def poll(self) -> int | None:
        """Its exit code, if it has ended."""
        if self.returncode is None:
            with contextlib.suppress(BlockingIOError):
                self.returncode = self._heard(socket.MSG_PEEK | socket.MSG_DONTWAIT)
        return self.returncode

    def _heard(self, flags: int) -> int:
        """What its keeper says; nothing where that was ended, as by Ctrl-C."""
        return int(self._keeper.recv(32, flags) or -signal.SIGKILL)

    def send_signal(self, signum: int) -> None:
        """Nothing if it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # its keeper is about to say that it has ended
                os.kill(self.pid, signum)

    def kill(self) -> None:
        """At once."""
        self.send_signal(signal.SIGKILL)

    def __del__(self) -> None:
        self._keeper.close()


class WarmPython:
    """Starts programs; one is enough for all tests of a process."""

    def __init__(self) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = "import warm; warm.serve_tests()"
        command = [sys.executable, "-c", program, str(theirs.fileno()), ROOM_FOR_COMMAND]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), MARK: NO_MARK}
        with theirs:
            self._process = cold_popen(command, env=environment, pass_fds=[theirs.fileno()])

    def start(
        self,
        command: Sequence[str | Path],
        *,
        cwd: Path,
        env: Mapping[str, str],
        stdout: IO[Any] | int = 1,
        stderr: IO[Any] | int = 2,
        pass_fds: Sequence[int] = (),
        new_session: bool = False,
    ) -> Program:
        """Start a file of Python's, `-c` and a text or `-m` and a module, with arguments; it has nothing to read."""
        outputs = [each if isinstance(each, int) else each.fileno() for each in (stdout, stderr)]
        order = {
            "command": [str(part) for part in command],
            "cwd": str(cwd),
            "env": dict(env),
            "session": new_session,
            "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
            "descriptors": [1, 2, *pass_fds],
        }
        mine, keepers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with keepers:
            socket.send_fds(self._orders, [json.dumps(order).encode()], [keepers.fileno(), *outputs, *pass_fds])
        return Program(mine)


@functools.cache
def warm_python() -> WarmPython:
    """One for this process; it ends with it."""
    return WarmPython()


# ---- What starts Pythons in a process without knowing of this file


cold_popen = subprocess.Popen
_cold_spawn = util.spawnv_passfds
_cold_poll = popen_fork.Popen.poll
_spawned: dict[int, Program] = {}


def start_in_forks_of(python: Callable[[], WarmPython]) -> None:
    """Have this process's fork servers, and what multiprocessing spawns, as a Dask nanny its worker, start in forks.

    Args:
        python: Asked for a warm Python once one is needed.
    """

    class Popen(cold_popen):  # type: ignore[type-arg,misc,valid-type]
        def __new__(cls, *arguments: Any, **options: Any) -> Any:
            if _is_fork_server(command := arguments[0] if arguments else None):
                return python().start(
                    command[command.index("-c") :],
                    cwd=Path.cwd(),
                    env=options["env"],
                    pass_fds=options["pass_fds"],
                    new_session=options["start_new_session"],
                )
            return super().__new__(cls)

    def spawn(path: Any, command: Sequence[Any], descriptors: Sequence[int]) -> int:
        words = [os.fsdecode(word) for word in command]
        if "--multiprocessing-fork" not in words:
            return _cold_spawn(path, command, descriptors)
        program = python().start(words[words.index("-c") :], cwd=Path.cwd(), env=os.environ, pass_fds=descriptors)
        _spawned[program.pid] = program
        return program.pid

    subprocess.Popen = Popen  # type: ignore[misc]
    util.spawnv_passfds = spawn
    popen_fork.Popen.poll = _poll  # type: ignore[method-assign]


def start_cold(patch: pytest.MonkeyPatch) -> None:
    """Until that is undone, have them start as users' do, with nothing imported that they do not import themselves."""
    patch.setattr(subprocess, "Popen", cold_popen)
    patch.setattr(util, "spawnv_passfds", _cold_spawn)


def _poll(self: popen_fork.Popen, flag: int = os.WNOHANG) -> int | None:
    if (program := _spawned.get(self.pid)) is None:
        return _cold_poll(self, flag)
    self.returncode = program.poll() if flag else program.wait()
    return self.returncode


def _is_fork_server(command: Any) -> bool:
    return isinstance(command, list) and any("node.fork_server import main;" in str(part) for part in command)


def answer_for_pip() -> None:
    """Have programs that ask pip what is installed, as flytekit does for each Deck, be told at once.

    What is installed is not for them to find out, and takes pip 1.5 s each time.
    """
    installed = sorted({(found.name, found.version) for found in metadata.distributions()})
    answers = {
        "list": json.dumps([{"name": name, "version": version} for name, version in installed]).encode(),
        "freeze": "\n".join(f"{name}=={version}" for name, version in installed).encode(),
    }
    cold_check_output = subprocess.check_output

    def check_output(command: Any, *arguments: Any, **options: Any) -> Any:
        known = isinstance(command, list) and command[1:3] == ["-m", "pip"]
        return answers[command[3]] if known else cold_check_output(command, *arguments, **options)

    subprocess.check_output = check_output


# ---- The process that has all imported


def serve_tests() -> None:
    """Be the warm Python of a process of tests."""
    gc.disable()
    sys.modules["triton"] = None  # type: ignore[assignment] # which says at the end of each program that it leaks
    for name in IMPORTED:
        importlib.import_module(name)
    del sys.modules["triton"]
    answer_for_pip()
    gc.collect()
    gc.freeze()
    gc.enable()
    _serve(socket.socket(fileno=int(sys.argv[1])))


def _serve(orders: socket.socket) -> None:
    """Fork a program for each order, and return in it; ends when there can be no more orders."""
    for signum in (signal.SIGINT, signal.SIGTERM):  # the programs' to heed
        signal.signal(signum, signal.SIG_IGN)
    running: dict[int, tuple[int, socket.socket]] = {}
    while True:
        ready, _, _ = select.select([orders, *running], [], [])
        for ended in set(ready) & running.keys():
            _tell_end(ended, *running.pop(ended))
        if orders not in ready:
            continue
        packet, descriptors, _, _ = socket.recv_fds(orders, MAX_ORDER, MAX_FILES)
        if not packet:
            os._exit(0)
        told, *files = descriptors
        if not (pid := os.fork()):
            for inherited in (told, *running, *(each.detach() for _, each in running.values()), orders.detach()):
                os.close(inherited)
            _run(json.loads(packet), files)
            return
        for file in files:  # what the program closes is closed
            os.close(file)
        keeper = socket.socket(fileno=told)
        running[os.pidfd_open(pid)] = pid, keeper
        keeper.send(str(pid).encode())


def _tell_end(ended: int, pid: int, keeper: socket.socket) -> None:
    os.close(ended)
    _, status = os.waitpid(pid, 0)
    with keeper, contextlib.suppress(OSError):  # nobody may be interested
        keeper.send(str(os.waitstatus_to_exitcode(status)).encode())


def _run(order: dict[str, Any], files: Sequence[int]) -> None:
    """Be the program."""
    import dask

    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, order["blocked"])  # as its starter has it: not as the warm Python's had
    if order["session"]:
        os.setsid()
    _take(files, order["descriptors"])
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    tempfile.tempdir = None
    dask.config.refresh()
    if (num_threads := os.environ.get("OMP_NUM_THREADS", "")).isdecimal():
        import torch

        torch.set_num_threads(int(num_threads))
    _show(order["command"])
    if not _is_fork_server(order["command"]):
        _keep_spare()
    _execute(order["command"])


def _take(files: Sequence[int], targets: Sequence[int]) -> None:
    """The program's files, under the numbers that it expects; nothing to read."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    aside = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 512) for file in (nothing, *files)]
    for file in (nothing, *files):
        os.close(file)
    for file, target in zip(aside, (0, *targets), strict=True):
        os.dup2(file, target)
        os.close(file)


def _show(command: Sequence[str]) -> None:
    """Have the system show this command and the order's mark as this process's own."""
    numbers = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arguments, end, variables = (int(number) for number in numbers[45:48])
    shown = "\0".join([sys.executable, *command]).encode()[: end - arguments - 1]
    ctypes.memmove(arguments, shown.ljust(end - arguments, b"\0"), end - arguments)
    place = Path("/proc/self/environ").read_bytes().find(f"{MARK}=".encode())
    mark = os.environ.get(MARK, NO_MARK).encode()
    assert len(mark) == len(NO_MARK), mark
    ctypes.memmove(variables + place + len(MARK) + 1, mark, len(mark))


def _keep_spare() -> None:
    """For what this program starts: as warm as this one, and nothing of it has run."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        _show(["spare"])
        os.closerange(3, theirs.fileno())
        os.closerange(theirs.fileno() + 1, 1024)
        _serve(theirs)
        raise SystemExit
    theirs.close()
    spare = WarmPython.__new__(WarmPython)
    spare._orders = mine
    start_in_forks_of(lambda: spare)


def _execute(command: Sequence[str]) -> None:
    found_by = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*found_by, *sys.path[2:]]  # without the empty one, and this folder
    main = vars(sys.modules["__main__"])
    main.clear()
    main.update(__name__="__main__", __builtins__=builtins, __spec__=None, __doc__=None)
    if command[0] == "-m":
        sys.path.insert(0, str(Path.cwd()))
        sys.orig_argv[1:] = command
        sys.argv[:] = ["-m", *command[2:]]
        importlib.invalidate_caches()
        runpy._run_module_as_main(command[1])  # type: ignore[attr-defined]  # as Python itself does
        return
    if command[0] == "-c":
        sys.path.insert(0, "")
        sys.orig_argv[1:] = command
        sys.argv[:] = ["-c", *command[2:]]
        code: str | bytes = command[1]
        name = "<string>"
    else:
        sys.argv[:] = sys.orig_argv[1:] = command
        program = Path(sys.argv[0]).absolute()
        sys.path.insert(0, str(program.resolve().parent))
        main["__file__"] = name = str(program)
        code = program.read_bytes()
    importlib.invalidate_caches()  # packages that lie in several folders are looked for in those found now
    exec(compile(code, name, "exec"), main)
