"""A Python that has torch and Dask imported, and runs programs in forks of itself, which spares each of them seconds.

Besides, such a program is what `python program.py` is: a process of its own with its own `__main__`, which imports all
else itself, flytekit and the package under test among it. Not for a program whose variables Python, torch or Dask read
when they start, nor for one that is to be found by its mark: its environment is seen in its children only.
"""

from __future__ import annotations

import builtins
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

MAX_ORDER = 1 << 17


class Program:
    """One that runs; of `subprocess.Popen` what the tests need."""

    def __init__(self, keeper: socket.socket) -> None:
        self._keeper = keeper
        self.pid = int(keeper.recv(32))
        self.returncode: int | None = None

    def wait(self) -> int:
        """Until it has ended; its exit code."""
        if self.returncode is None:
            self.returncode = int(self._keeper.recv(32))
            self._keeper.close()
        return self.returncode

    def poll(self) -> int | None:
        """Its exit code, if it has ended."""
        if self.returncode is None and select.select([self._keeper], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def send_signal(self, signum: int) -> None:
        """Nothing if it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        """At once."""
        self.send_signal(signal.SIGKILL)


class WarmPython:
    """Starts programs; one is enough for all tests of a process."""

    def __init__(self, mark: str) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-c", "import warm; warm.serve()", str(theirs.fileno())]
        environment = {name: value for name, value in os.environ.items() if name != mark}
        environment["PYTHONPATH"] = str(Path(__file__).parent)
        with theirs:
            self._process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])

    def start(
        self,
        command: Sequence[str | Path],
        *,
        cwd: Path,
        env: Mapping[str, str],
        stdout: IO[Any] | int = 1,
        stderr: IO[Any] | int = 2,
        new_session: bool = False,
    ) -> Program:
        """Start a file of Python's, with its arguments; it has nothing to read."""
        order = {"command": [str(part) for part in command], "cwd": str(cwd), "env": dict(env), "session": new_session}
        mine, keepers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        outputs = [each if isinstance(each, int) else each.fileno() for each in (stdout, stderr)]
        with keepers:
            socket.send_fds(self._orders, [json.dumps(order).encode()], [keepers.fileno(), *outputs])
        return Program(mine)


# ---- The process that has all imported


def serve() -> None:
    """Fork a program for each order; returns in the programs, and when there are no more orders."""
    import distributed  # noqa: F401
    import torch.distributed  # noqa: F401

    orders = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
    gc.freeze()
    while True:
        packet, descriptors, _, _ = socket.recv_fds(orders, MAX_ORDER, 3)
        if not packet:
            return
        if os.fork() == 0:
            orders.close()
            _keep(json.loads(packet), *descriptors)
            return
        for descriptor in descriptors:
            os.close(descriptor)


def _keep(order: dict[str, Any], told: int, stdout: int, stderr: int) -> None:
    """Start the program, and tell how it ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if not (pid := os.fork()):
        os.close(told)
        _run(order, stdout, stderr)
        return
    os.write(told, str(pid).encode())
    _, status = os.waitpid(pid, 0)
    os.write(told, str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _run(order: dict[str, Any], stdout: int, stderr: int) -> None:
    """Be the program."""
    import dask

    if order["session"]:
        os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (stdout, 1), (stderr, 2)):
        os.dup2(source, target)
        os.close(source)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    tempfile.tempdir = None
    dask.config.refresh()
    sys.argv[:] = sys.orig_argv[1:] = order["command"]
    program = Path(sys.argv[0]).absolute()
    found_by = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [str(program.resolve().parent), *found_by, *sys.path[2:]]  # without the empty one, and this folder
    importlib.invalidate_caches()  # packages that lie in several folders are looked for in those found now
    main = vars(sys.modules["__main__"])
    main.clear()
    main.update(__name__="__main__", __file__=str(program), __builtins__=builtins, __spec__=None, __doc__=None)
    exec(compile(program.read_bytes(), str(program), "exec"), main)
