"""What the benchmarks share: programs and clusters in processes of their own, of which none is left at the end."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from launch import console_script

ROOT = Path(__file__).resolve().parent.parent

TIME_LIMIT = 180.0
"""Seconds for whatever is waited for, unless it says otherwise."""
MARK = "DASKPYTORCH_BENCHMARK"
"""An environment variable that every process has which was started here, and those that they start."""

WORKER = "spawn_main"
"""What is in the command line of a worker that a nanny has started."""

NOTE_WORKERS = """
import time
from distributed import SchedulerPlugin

class Notes(SchedulerPlugin):
    def add_worker(self, scheduler, worker):
        self._note("+", worker)

    def remove_worker(self, scheduler, worker, **others):
        self._note("-", worker)

    def _note(self, sign, worker):
        with open("workers", "a") as notes:
            notes.write(f"{sign} {worker} {time.time()!r}\\n")

def dask_setup(scheduler):
    scheduler.add_plugin(Notes())
"""

FOLLOW = """
import json
import torch
from torch import distributed

def wait_for_all(device):
    distributed.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()

def follow(folder, take_turn):
    rank = distributed.get_rank()
    with open(f"{folder}/reports-{rank}", "a", buffering=1) as reports, open(f"{folder}/orders-{rank}") as orders:
        for line in orders:
            reports.write(json.dumps(take_turn(*json.loads(line))) + "\\n")
"""
"""What the ranks of a `Gang` do, each with a function of its own."""


@contextlib.contextmanager
def nothing_left(name: str) -> Iterator[Path]:
    """A folder, which is removed at the end; every process started inside is ended, with all that it has started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ[MARK] = mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix=f"{name}-", ignore_cleanup_errors=True) as folder:
        try:
            yield Path(folder)
        finally:
            while marked := _marked(mark):  # a nanny may have started a worker since
                for pid in marked:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                _reap()
                time.sleep(0.05)


class Program:
    """A program in a process of its own. It may be told lines, and says lines that begin with `@` and a word."""

    def __init__(self, command: list[str], folder: Path, environment: dict[str, str] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._what = " ".join(command)
        self.log = folder / "log"
        """What it writes to its standard error."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                env=os.environ | (environment or {}),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._heard: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    @classmethod
    def of(cls, text: str, folder: Path, *arguments: str, environment: dict[str, str] | None = None) -> Program:
        """Run this Python text."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "program.py").write_text(text)
        return cls([sys.executable, "program.py", *arguments], folder, environment)

    def tell(self, line: str) -> None:
        """Write a line to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def hear(self, word: str, timeout: float = TIME_LIMIT) -> str:
        """Wait until it says that word; what else is in the line."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                line = self._heard.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise self.failure(f"was not {word} within {timeout:g} s") from None
            if line is None:
                raise self.failure(f"ended before it was {word}")
            if line.split(maxsplit=1)[:1] == [f"@{word}"]:
                return line.partition(" ")[2].strip()

    def hear_any(self, timeout: float = TIME_LIMIT) -> str:
        """Wait for the next line that it says."""
        try:
            line = self._heard.get(timeout=timeout)
        except queue.Empty:
            raise self.failure(f"said nothing for {timeout:g} s") from None
        if line is None:
            raise self.failure("ended")
        return line.strip()

    def has_spoken(self) -> bool:
        """It has said something that was not heard yet, or has ended."""
        return not self._heard.empty()

    def wait(self, timeout: float = TIME_LIMIT) -> int:
        """Wait for its end; its exit code."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise self.failure(f"did not end within {timeout:g} s") from None

    def kill(self) -> None:
        """End it, and all that it has started."""
        _kill_tree(self._process.pid)
        self._process.wait()

    def failure(self, what: str) -> SystemExit:
        """An error with the end of its log."""
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])
        return SystemExit(f"{self._what} {what}. The end of its log:\n{tail}")

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._heard.put(line)
        self._heard.put(None)


class Gang:
    """Ranks that `follow`: each takes a turn when it is told to, and waits in between."""

    def __init__(self, num_ranks: int, folder: Path, command: list[str], text: str) -> None:
        """Start a command that runs this Python text, `program.py`, in the folder."""
        folder.mkdir(parents=True)
        (folder / "program.py").write_text(text)
        self._paths = [folder / f"orders-{rank}" for rank in range(num_ranks)]
        for path in self._paths:
            os.mkfifo(path)
        self._reported_in = folder / "reports-0"
        self._orders: list[IO[str]] = []
        self._num_turns = 0
        self.program = Program(command, folder, {"PYTHONPATH": str(ROOT)})

    @classmethod
    def of_torchrun(cls, num_ranks: int, folder: Path, text: str, *arguments: object) -> Gang:
        """One whose ranks run that text under `torchrun`. Its arguments are the folder and these, as JSON."""
        command = [console_script("torchrun"), "--standalone", f"--nproc-per-node={num_ranks}", "program.py"]
        return cls(num_ranks, folder, [*command, json.dumps([str(folder), *arguments])], text)

    @classmethod
    def of_driver(cls, num_ranks: int, folder: Path, text: str, *arguments: object) -> Gang:
        """One whose driver runs that text. Its arguments are the folder and these, as JSON."""
        command = [sys.executable, "program.py", json.dumps([str(folder), *arguments])]
        return cls(num_ranks, folder, command, text)

    def take_turn(self, *order: object) -> Any:
        """Have each rank do something, and wait for it; what rank 0 says of it."""
        if not self._orders:
            self._orders = [self._opened(path) for path in self._paths]
        for orders in self._orders:
            orders.write(f"{json.dumps(order)}\n")
            orders.flush()
        self._num_turns += 1
        until(lambda: len(self._reports()) == self._num_turns or self._has_ended(), f"the turn {order}")
        return json.loads(self._reports()[-1])

    def _opened(self, path: Path) -> IO[str]:
        """The way to a rank, once it waits for its orders."""
        found: list[int] = []

        def is_read() -> bool:
            try:
                found.append(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
            except OSError:  # nobody reads
                return self._has_ended()
            return True

        until(is_read, "the ranks to start")
        return os.fdopen(found[0], "w")

    def _reports(self) -> list[str]:
        path = self._reported_in
        return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def _has_ended(self) -> bool:
        if self.program.has_spoken():
            raise self.program.failure("ended")
        return False


class Cluster:
    """A Dask scheduler and workers with their nannies, in an empty directory."""

    def __init__(self, folder: Path, num_workers: int) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._num_started = 0
        (folder / "note_workers.py").write_text(NOTE_WORKERS)
        options = ["--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--preload", "note_workers.py"]
        self.scheduler = self._start("scheduler", *options, "--scheduler-file", "contact.json")
        self.contact = str(folder / "contact.json")
        """For `Client(scheduler_file=...)`."""
        self.nannies = [self._start_worker() for _ in range(num_workers)]
        self.wait_for(num_workers)

    def wait_for(self, num_workers: int) -> None:
        """Wait until so many workers are registered."""
        until(lambda: len(self.workers()) == num_workers, f"{num_workers} workers; see {self._folder / 'log'}")

    def workers(self) -> dict[str, float]:
        """The addresses of those registered, and when they were."""
        registered: dict[str, float] = {}
        notes = self._folder / "workers"
        for line in notes.read_text().splitlines() if notes.exists() else []:
            sign, address, at = line.split()
            if sign == "+":
                registered[address] = float(at)
            else:
                registered.pop(address, None)
        return registered

    def worker_pid(self, nanny: int) -> int:
        """The worker below that nanny."""
        return worker_below(nanny)

    def lose(self, nanny: int) -> None:
        """Kill a worker with its nanny, as when its pod is lost."""
        pids = [nanny, self.worker_pid(nanny)]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self.nannies.remove(nanny)

    def add_worker(self) -> None:
        """Start one more, and wait until it is registered."""
        self.start_worker()
        self.wait_for(len(self.nannies))

    def start_worker(self) -> None:
        """Start one more."""
        self.nannies.append(self._start_worker())

    def close(self) -> None:
        """End it, and all that runs on it."""
        for pid in (*self.nannies, self.scheduler):
            _kill_tree(pid)
        _reap()

    def _start_worker(self) -> int:
        self._num_started += 1
        name = f"worker-{self._num_started}"
        options = ["--nthreads", "1", "--memory-limit", "2Gi", "--no-dashboard", "--scheduler-file", "contact.json"]
        # A scheduler that is just ending has removed its file; the worker finds that out by itself.
        until(
            lambda: read(self.contact).strip() or not is_running(self.scheduler),
            f"the scheduler; see {self._folder / 'log'}",
        )
        return self._start("worker", "--name", name, *options)

    def _start(self, kind: str, *options: str) -> int:
        # As the backend has it: task environment sets these, and the project's modules are not there.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {
            "DASK_DISTRIBUTED__WORKER__DAEMON": "False",
            "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0",
            "DASK_DISTRIBUTED__ADMIN__TICK__INTERVAL": "1s",
            "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False",
            "DASK_DISTRIBUTED__WORKER__MEMORY__MONITOR_INTERVAL": "500ms",
        }
        with (self._folder / "log").open("ab") as log:
            process = subprocess.Popen(
                [console_script(f"dask-{kind}"), *options],
                cwd=self._folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        _started.append(process)
        return process.pid


def children_of(pid: int) -> list[int]:
    """Its child processes."""
    return [int(child) for task in entries(f"/proc/{pid}/task") for child in read(f"{task}/children").split()]


def parent_of(pid: int) -> int:
    """Its parent; 0 where it has gone."""
    fields = read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return int(fields[1]) if fields else 0


def worker_of(rank: int) -> int:
    """The Dask worker that a rank runs beside."""
    server = parent_of(rank)
    if (nanny := nanny_of(server)) is None:
        raise SystemExit(f"the fork server of the process {rank} watches no nanny")
    return worker_below(nanny)


def nanny_of(server: int) -> int | None:
    """The nanny whose workers a fork server serves: the process that it watches.

    The worker that has started it may have been an earlier one of the same nanny.
    """
    for watched in entries(f"/proc/{server}/fdinfo"):
        if found := re.search(r"^Pid:\s*(\d+)$", read(watched), re.MULTILINE):
            return int(found[1])
    return None


def worker_below(nanny: int) -> int:
    """The worker that a nanny has now."""
    found = [pid for pid in children_of(nanny) if WORKER in read(f"/proc/{pid}/cmdline") and is_running(pid)]
    if not found:
        raise SystemExit(f"the nanny {nanny} has no worker")
    return found[0]


def is_running(pid: int) -> bool:
    """Whether there is such a process, and not only its exit code."""
    return read(f"/proc/{pid}/stat").rpartition(")")[2].split()[:1] not in ([], ["Z"])


def until(condition: Callable[[], object], what: str, timeout: float = TIME_LIMIT) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {timeout:g} s for {what}")
        time.sleep(0.01)


_started: list[subprocess.Popen[bytes]] = []
"""Kept, since a Popen object that goes takes its exit code along, and warns."""


def started_here() -> list[int]:
    """What runs of all that was started inside `nothing_left`, by whomever."""
    _reap()
    return _marked(os.environ[MARK])


def _marked(mark: str) -> list[int]:
    """The processes, other than this one, that carry the mark."""
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [
        pid
        for pid in pids
        if pid != os.getpid() and f"{MARK}={mark}" in read(f"/proc/{pid}/environ") and is_running(pid)
    ]


def _kill_tree(root: int) -> None:
    pids = [root]
    for pid in pids:  # grows: ranks have sessions of their own, under `torchrun`, too, where they would stay
        pids += children_of(pid)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _reap() -> None:
    for process in _started:
        process.poll()


def entries(folder: str) -> list[Path]:
    """What is in a folder of a process, if that still runs."""
    try:
        return list(Path(folder).iterdir())
    except OSError:  # the process has gone
        return []


def read(path: str | Path) -> str:
    """A file of a process; empty if that has gone."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:  # the process has gone, or is another user's
        return ""
