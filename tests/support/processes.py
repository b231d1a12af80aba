"""Real schedulers, workers and containers' commands as processes, for the integration tests."""

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil
import pytest

import preload
from flytekitplugins.daskpytorch.node import fork_client
from flytekitplugins.daskpytorch.protocol.framing import Connection
from preload import TESTS_IMPORT
from warm import MARK, Program, warm_python

SCRIPTS = Path(sys.executable).parent
"""Where the installed commands are: pyflyte, pyflyte-execute, dask-scheduler, dask-worker."""
PRELOAD = str(Path(preload.__file__))
"""Has a Dask worker's fork server import what is named in a variable."""
TASKS_IMPORT = (*TESTS_IMPORT, "flytekitplugins.daskpytorch.flyte.context:finish_imports")
"""What the ranks of tasks need ahead, and those of tests that import flytekit."""

OF_FLYTE2 = {
    "_U_ORG_NAME": "org",
    "FLYTE_INTERNAL_EXECUTION_PROJECT": "tests",
    "FLYTE_INTERNAL_EXECUTION_DOMAIN": "development",
    "_U_EP_OVERRIDE": "127.0.0.1:1",
    "_UNION_EAGER_API_KEY": "",
    "FLYTE_CLUSTERED_WORKER": "1",  # without a controller, which would want a backend
}
"""Environment variables of a Flyte 2 container."""
MAX_SECONDS = 55.0
"""From a fault to the next attempt, or to the error, even on a very busy host: whatever waits for a time-out of TCP,
gloo, NCCL or a handshake takes longer. A bound, not a measurement; for that see `benchmarks/recovery.py`."""


@dataclass
class Cluster:
    """A running Dask cluster."""

    address: str
    scheduler: subprocess.Popen[bytes] | Program
    workers: list[subprocess.Popen[bytes] | Program] = field(default_factory=list)
    starts: list[Callable[[], subprocess.Popen[bytes] | Program]] = field(default_factory=list)
    """How each worker was started."""

    def make_whole(self) -> None:
        """Start again the workers that a test has killed, and wait for all."""
        for index, worker in enumerate(self.workers):
            if worker.poll() is not None:
                self.workers[index] = self.starts[index]()
        wait_for_workers(self.address, len(self.workers))

    def kill_worker(self, index: int) -> None:
        """Kill a worker with its nanny, as when its pod is lost."""
        nanny = psutil.Process(self.workers[index].pid)
        victims = [nanny, *nanny.children(recursive=True)]
        for victim in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.send_signal(signal.SIGKILL)

    def worker_process(self, index: int) -> psutil.Process:
        """The worker below its nanny."""
        nanny = psutil.Process(self.workers[index].pid)
        found: list[psutil.Process] = []

        def started() -> bool:
            found[:] = _running(nanny.children(recursive=True), "spawn_main")
            return bool(found)

        until(started, "the nanny to start its worker")
        return found[0]


@contextlib.contextmanager
def dask_cluster(
    folder: Path,
    num_workers: int = 2,
    *,
    scheduler_host: str = "127.0.0.1",
    hosts: Sequence[str] | None = None,
    memory_limit: str = "2Gi",
    imported_ahead: Sequence[str] = TESTS_IMPORT,
    prefixes: Mapping[int, Sequence[str]] | None = None,
    worker_environments: Mapping[int, Mapping[str, str]] | None = None,
    of_flyte2: Mapping[str, str] | None = None,
    is_warm: bool = True,
    wait: bool = True,
) -> Iterator[Cluster]:
    """Start scheduler and workers the backend's way, in an empty directory; the project's modules are not there.

    Warm processes share most of their memory, but each counts all of it as its own. `of_flyte2` are the variables that
    a task of Flyte 2 has in all its pods, where its backend starts them, by commands that Dask itself has.
    """
    from flytekitplugins.daskpytorch.task.in_ranks import GANG_SETTINGS  # not in ranks, which import this module, too

    empty = folder / "empty"
    empty.mkdir(parents=True, exist_ok=True)
    contact = folder / "scheduler.json"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= GANG_SETTINGS
    # Most gangs here have no use for a fork server that starts ahead.
    env |= {"DASK_DISTRIBUTED__WORKER__PRELOAD": PRELOAD, preload.VARIABLE: " ".join(imported_ahead)}
    env |= of_flyte2 or {}
    names = ("dask-scheduler", "dask-worker") if of_flyte2 is None else ("dask scheduler", "dask worker")
    scheduler_command, worker_command = ([str(SCRIPTS / word), *more] for word, *more in map(str.split, names))
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((folder / "cluster.log").open("wb"))

        def start(command: list[str], extra: Mapping[str, str]) -> subprocess.Popen[bytes] | Program:
            process = start_program(command, cwd=empty, env=env | dict(extra), log=log, is_warm=is_warm)
            stack.callback(end, process)
            return process

        options = ["--port", "0", "--dashboard-address", ":0", "--scheduler-file", str(contact)]
        scheduler = start([*scheduler_command, "--host", scheduler_host, *options], {})
        until(lambda: contact.exists() and contact.read_text().strip(), "the scheduler to start")
        address = json.loads(contact.read_text())["address"]
        cluster = Cluster(address=address, scheduler=scheduler)
        for index in range(num_workers):
            command = [*(prefixes or {}).get(index, ()), *worker_command, "--name", f"worker-{index}"]
            command += ["--nthreads", "1", "--memory-limit", memory_limit]
            if hosts:
                command += ["--host", hosts[index]]
            extra = {"DASK_SCHEDULER_ADDRESS": address, **((worker_environments or {}).get(index, {}))}
            cluster.starts.append(functools.partial(start, command, extra))
            cluster.workers.append(cluster.starts[-1]())
        if wait:
            wait_for_workers(address, num_workers)
        yield cluster


@contextlib.contextmanager
def shared_cluster(folder: Path) -> Iterator[Cluster]:
    """Two workers on two hosts, for many tests: no mark of one of them is theirs. Nothing is left behind at last."""
    mark = uuid.uuid4().hex
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(MARK, mark)
            hosts = ["127.0.0.2", "127.0.0.3"]
            cluster = stack.enter_context(dask_cluster(folder, hosts=hosts, imported_ahead=TASKS_IMPORT))
        yield cluster
    until(lambda: not marked(mark), lambda: f"to end: {marked(mark)}")


def start_worker(
    address: str, index: int, folder: Path, environment: Mapping[str, str] | None = None
) -> Callable[[], None]:
    """Start one more worker; returns what ends it."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | dict(environment or {})
    command = [str(SCRIPTS / "dask-worker"), "--name", f"late-{index}", "--nthreads", "1", "--memory-limit", "2Gi"]
    with Path(os.devnull).open("wb") as nowhere:
        process = start_program(command, cwd=folder, env={**env, "DASK_SCHEDULER_ADDRESS": address}, log=nowhere)
    return lambda: end(process)


def start_program(
    command: list[str], *, cwd: Path, env: Mapping[str, str], log: IO[bytes], is_warm: bool = True
) -> subprocess.Popen[bytes] | Program:
    """Start a command in a session of its own: in a fork of `warm_python` where it is an installed one of Python's."""
    if is_warm and Path(command[0]).parent == SCRIPTS:
        return warm_python().start(command, cwd=cwd, env=env, stdout=log, stderr=log, new_session=True)
    return subprocess.Popen(command, cwd=cwd, env=env, stdout=log, stderr=log, start_new_session=True)


def wait_for_workers(address: str, count: int) -> None:
    """Until that many workers are there."""
    from distributed import Client

    if count:
        with Client(address, timeout=30) as client:
            client.wait_for_workers(count)


def run_program(
    command: Sequence[str | Path], *, cwd: Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """What becomes of a program of Python's, a script or an installed command, in a fork of `warm_python`."""
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        program = warm_python().start(command, cwd=cwd, env=os.environ | dict(env or {}), stdout=stdout, stderr=stderr)
        code = program.wait()
        said = [os.pread(each.fileno(), os.fstat(each.fileno()).st_size, 0).decode() for each in (stdout, stderr)]
    return subprocess.CompletedProcess(command, code, *said)


@contextlib.contextmanager
def running(
    command: Sequence[str | Path], *, cwd: Path, log: Path, env: Mapping[str, str] | None = None
) -> Iterator[Program]:
    """A program of Python's until the end of the block, in a fork of `warm_python`; its output goes to a file."""
    environment = os.environ | dict(env or {})
    with log.open("wb") as said:
        program = warm_python().start(command, cwd=cwd, env=environment, stdout=said, stderr=said, new_session=True)
    try:
        yield program
    finally:
        end(program)


def end(process: subprocess.Popen[bytes] | Program) -> None:
    """End a process that a test started, with all its children."""
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
        tree = psutil.Process(process.pid)
        family = [*tree.children(recursive=True), tree]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        until(lambda: not any(is_alive(member.pid) for member in family), "killed processes to end")
    process.wait()


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended may wait for seconds until somebody takes note of it."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def num_open_files() -> int:
    """Of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def until(condition: Callable[[], object], what: str | Callable[[], str], timeout: float = 200.0) -> None:
    """Wait for a condition; fails with what was waited for."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout:g} s for {what if isinstance(what, str) else what()}"
        time.sleep(0.02)


@contextlib.contextmanager
def nothing_left_behind() -> Iterator[str]:
    """Fails if a process started inside still runs afterwards; ends this process's fork server, as its end does."""
    mark, outer = uuid.uuid4().hex, os.environ.get(MARK)
    os.environ[MARK] = mark
    try:
        yield mark
        fork_client.shutdown()
        with contextlib.suppress(AssertionError):
            until(lambda: not marked(mark), "processes to end")
        assert not (left := marked(mark)), f"still running: {left}"
    finally:
        del os.environ[MARK]
        if outer is not None:
            os.environ[MARK] = outer


def fork_server() -> psutil.Process:
    """The one that this process owns, its child or its warm Python's; other children may be those of other tests."""
    found: list[psutil.Process] = []

    def started() -> bool:  # the kernel gives the command of a program that is just being started as empty
        own = psutil.Process()
        servers = _running(own.children(recursive=True), "daskpytorch.node.fork_server")  # their ranks among them
        starters = {own.pid, *(child.pid for child in own.children())} - {server.pid for server in servers}
        with contextlib.suppress(psutil.NoSuchProcess):
            found[:] = [server for server in servers if server.ppid() in starters]
        return bool(found)

    until(started, "the fork server")
    [server] = found
    return server


def _running(processes: list[psutil.Process], what: str) -> list[psutil.Process]:
    """Those whose command has it; any other may have ended."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if what in " ".join(process.cmdline()):
                found.append(process)
    return found


def ranks_of(server: psutil.Process) -> list[psutil.Process]:
    """What it has forked; not what torch starts while it is imported, and what may end any moment."""
    ranks = []
    for child in server.children(recursive=True):
        with contextlib.suppress(ProcessLookupError):
            ranks += [child] if os.getsid(child.pid) == child.pid else []
    return ranks


def marked(mark: str) -> list[str]:
    """The processes, other than this one, that carry the mark in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
    return found


def ends() -> tuple[Connection, Connection]:
    """Both ends of a connection such as driver and agents have."""
    ours, theirs = socket.socketpair()
    return Connection(ours), Connection(theirs)


@contextlib.contextmanager
def small_disk(folder: Path, size: str = "1m") -> Iterator[Path]:
    """A file system of this size; skips where none can be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def files(folder: Path) -> dict[str, bytes]:
    """All there is, also what should not be."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
