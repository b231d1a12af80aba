"""Real schedulers, workers and containers' commands as processes, for the integration tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from flytekitplugins.daskpytorch import dispatch
from flytekitplugins.daskpytorch.flyte.task import GANG_SETTINGS
from flytekitplugins.daskpytorch.node.fork_server import QUIET
from flytekitplugins.daskpytorch.protocol.framing import Connection

SCRIPTS = Path(sys.executable).parent
"""Where the installed commands are: pyflyte, pyflyte-execute, dask-scheduler, dask-worker."""
MARK = "DASKPYTORCH_TEST_MARK"
"""An environment variable by which a test knows the processes that it caused."""

MAX_SECONDS = 55.0
"""From a fault to the next attempt, or to the error, even on a very busy host: whatever waits for a time-out of TCP,
gloo, NCCL or a handshake takes longer. A bound, not a measurement; for that see `benchmarks/recovery.py`."""


@dataclass
class Cluster:
    """A running Dask cluster."""

    address: str
    scheduler: subprocess.Popen[bytes]
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    logs: Path = Path()

    def kill_worker(self, index: int) -> None:
        """Kill a worker with its nanny, as when its pod is lost."""
        nanny = psutil.Process(self.workers[index].pid)
        victims = [nanny, *nanny.children(recursive=True)]
        for victim in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.send_signal(signal.SIGKILL)

    def kill_worker_process(self, index: int) -> None:
        """Kill a worker alone: its nanny brings a new one, at a new address."""
        self.worker_process(index).kill()

    def worker_process(self, index: int) -> psutil.Process:
        """The worker below its nanny."""
        nanny = psutil.Process(self.workers[index].pid)
        until(lambda: _running(nanny.children(), "spawn_main"), "the nanny to start its worker")
        return _running(nanny.children(), "spawn_main")[0]


@contextlib.contextmanager
def dask_cluster(
    folder: Path,
    num_workers: int = 2,
    *,
    scheduler_host: str = "127.0.0.1",
    hosts: Sequence[str] | None = None,
    memory_limit: str = "2Gi",
    prefixes: Mapping[int, Sequence[str]] | None = None,
    worker_environments: Mapping[int, Mapping[str, str]] | None = None,
    wait: bool = True,
) -> Iterator[Cluster]:
    """Start scheduler and workers the backend's way, in an empty directory; the project's modules are not there."""
    empty = folder / "empty"
    empty.mkdir(parents=True, exist_ok=True)
    contact = folder / "scheduler.json"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= GANG_SETTINGS
    del env["DASK_DISTRIBUTED__WORKER__PRELOAD"]  # most gangs here have no use for torch imported ahead
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((folder / "cluster.log").open("wb"))

        def start(command: list[str], extra: Mapping[str, str]) -> subprocess.Popen[bytes]:
            command = [str(SCRIPTS / part) if part.startswith("dask-") else part for part in command]
            process = subprocess.Popen(
                command, cwd=empty, env=env | dict(extra), stdout=log, stderr=log, start_new_session=True
            )
            stack.callback(end, process)
            return process

        options = [
            "--host",
            scheduler_host,
            "--port",
            "0",
            "--dashboard-address",
            ":0",
            "--scheduler-file",
            str(contact),
        ]
        scheduler = start(["dask-scheduler", *options], {})
        until(lambda: contact.exists() and contact.read_text().strip(), "the scheduler to start")
        address = json.loads(contact.read_text())["address"]
        cluster = Cluster(address=address, scheduler=scheduler, logs=folder / "cluster.log")
        for index in range(num_workers):
            command = [*(prefixes or {}).get(index, ()), "dask-worker", "--name", f"worker-{index}"]
            command += ["--nthreads", "1", "--memory-limit", memory_limit]
            if hosts:
                command += ["--host", hosts[index]]
            extra = {"DASK_SCHEDULER_ADDRESS": address, **((worker_environments or {}).get(index, {}))}
            cluster.workers.append(start(command, extra))
        if wait:
            wait_for_workers(address, num_workers)
        yield cluster


def start_worker(
    address: str, index: int, folder: Path, environment: Mapping[str, str] | None = None
) -> Callable[[], None]:
    """Start one more worker; returns what ends it."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | dict(environment or {})
    command = [str(SCRIPTS / "dask-worker"), "--name", f"late-{index}", "--nthreads", "1", "--memory-limit", "2Gi"]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**env, "DASK_SCHEDULER_ADDRESS": address},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    return lambda: end(process)


def wait_for_workers(address: str, count: int) -> None:
    """Until that many workers are there."""
    from distributed import Client

    if count:
        with Client(address, timeout=30) as client:
            client.wait_for_workers(count)


def run_after_a_pause(client: Any, function: Callable[[], Any]) -> list[Any]:
    """What the ranks of a gang return: none was forked just before, so that a fork server finds time to import more."""
    time.sleep(2 * QUIET)
    return dispatch.run(client, function).result(60)


def end(process: subprocess.Popen[bytes]) -> None:
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
    """Fails if a process started inside still runs afterwards."""
    mark, outer = uuid.uuid4().hex, os.environ.get(MARK)
    os.environ[MARK] = mark
    try:
        yield mark
        with contextlib.suppress(AssertionError):
            until(lambda: not marked(mark), "processes to end")
        assert not (left := marked(mark)), f"still running: {left}"
    finally:
        del os.environ[MARK]
        if outer is not None:
            os.environ[MARK] = outer


def fork_server() -> psutil.Process:
    """The one that this process owns; its other children may be those of other tests, which have ended."""
    found: list[psutil.Process] = []

    def started() -> bool:  # the kernel gives the command of a program that is just being started as empty
        found[:] = _running(psutil.Process().children(), "daskpytorch.node.fork_server")
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


def refuse(*_: object) -> Any:
    """In place of what takes files or results, where none is sent."""
    raise ConnectionRefusedError("neither files nor results are taken here")
