"""Harness of the benchmarks: options, rounds, and programs and clusters in their own processes.

The contestants of a benchmark take turns. Each round runs each contestant once, and ratios compare results of one
round. A busy minute of the machine therefore slows all contestants. `nothing_left` ends all processes of a benchmark.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from figures import machine, number

ROOT = Path(__file__).resolve().parent.parent

TIME_LIMIT = 180.0
"""Default timeout, in seconds."""
MARK = "DASKPYTORCH_BENCHMARK"
"""Environment variable that marks the processes of a benchmark and their children."""

WORKER = "spawn_main"
"""Text in the command line of a worker that a nanny has started."""

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

MODULES = {"Ray Train": "ray", "Ray Tune": "ray", "Monarch": "monarch", "torchrunx": "torchrunx", "flyte run": "flyte"}
MODULES |= {"connector": "s3torchconnector", "second task": "flytekit"}
"""Modules of the contestants that `pip install '.[bench,flyte2]'` installs."""
SERVE = """
import json
import sys

def serve(call):
    print("@ready", flush=True)
    for line in sys.stdin:
        print("@done", json.dumps(call(*json.loads(line))), flush=True)
"""
"""Part of a program for `Program.call`, which calls a function for each line of its standard input."""
Turn = TypeVar("Turn")


def asked(about: str | None, ways: Iterable[str] = (), **options: tuple[Any, Any, str]) -> argparse.Namespace:
    """Parse the command line of a benchmark.

    Args:
        about: The benchmark's docstring, for `--help`.
        ways: Names of the contestants. `--only` chooses some. Contestants that are not installed are removed.
        options: Default value, value with `--quick` and help of each option.

    Returns:
        The options, the remaining `ways`, and `on`, the machine with its present load.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smallest size, to check that the benchmark still runs")
    for name, (usual, _, text) in options.items():
        several = {"nargs": "+"} if isinstance(usual, list) else {}
        kind = type(usual[0] if isinstance(usual, list) else usual)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=f"{text} (default: {usual})", **several)  # type: ignore[arg-type]
    if names := list(ways):
        text = f"measure only these, of {', '.join(names)}"
        parser.add_argument("--only", nargs="+", default=names, choices=names, metavar="NAME", help=text)
    found = parser.parse_args()
    for name, (usual, quick, _) in options.items():
        if getattr(found, name) is None:
            setattr(found, name, quick if found.quick else usual)
        if name == "rounds" and found.rounds < 1:
            parser.error(f"--rounds {found.rounds}: must be 1 or more")
    found.ways = [name for name in names if name in found.only and is_installed(name)]
    found.on = machine()
    return found


def is_installed(way: str) -> bool:
    """Return True if a contestant's module is installed. Print a note otherwise."""
    module = MODULES.get(way)
    if module is None or find_spec(module) is not None:
        return True
    print(f"{way} is left out, since {module} is not installed: pip install '.[bench,flyte2]'", file=sys.stderr)
    return False


def take_turns(
    ways: Mapping[str, Callable[[], Turn]], rounds: int, *, uncounted: int = 1, rng: random.Random | None = None
) -> dict[str, list[Turn]]:
    """Call each way once in each round.

    Args:
        ways: The contestants by name.
        rounds: Number of rounds that count.
        uncounted: Number of rounds before them, which warm caches, clusters and imports.
        rng: Random generator for a new order in each round. None: the order of `ways`.

    Returns:
        The results of each way, one for each round.
    """
    found: dict[str, list[Turn]] = {name: [] for name in ways}
    for turn in range(1 - uncounted, rounds + 1):
        for name in rng.sample(list(ways), len(ways)) if rng else ways:
            value = ways[name]()
            told = number(value) if isinstance(value, int | float) else str(value)[:120]
            print(f"round {turn} of {rounds}: {name}: {told}", file=sys.stderr, flush=True)
            if turn > 0:
                found[name].append(value)
    return found


def console_script(name: str) -> str:
    """Return the path of a command beside this Python, or else on the PATH."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    if found := shutil.which(name, path=path):
        return found
    raise SystemExit(f"there is no {name} beside {sys.executable}, nor on the PATH; pip install the package first")


def torchrun(num_ranks: int, restarts: int = 0) -> list[str]:
    """Return the command that runs a program under `torchrun` on this node, without the program."""
    return [console_script("torchrun"), "--standalone", f"--nproc-per-node={num_ranks}", f"--max-restarts={restarts}"]


@contextlib.contextmanager
def nothing_left(name: str) -> Iterator[Path]:
    """Yield a temporary folder. At the end, kill all processes that started inside, and remove the folder."""
    os.environ[MARK] = mark = uuid.uuid4().hex
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # as `pip install` leaves it, imports find compiled bytecode
    with tempfile.TemporaryDirectory(prefix=f"{name}-", ignore_cleanup_errors=True) as folder:
        try:
            yield Path(folder)
        finally:
            while marked := _marked(mark):  # a nanny may start a worker between two looks
                for pid in marked:
                    kill(pid)
                _reap()
                time.sleep(0.05)


class Program:
    """Program in its own process. The program reads lines, and prints lines that begin with `@` and a word."""

    def __init__(self, command: list[str], folder: Path, environment: dict[str, str] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._what = " ".join(command)
        self.log = folder / "log"
        """File with its standard error."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                env=os.environ | {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"} | (environment or {}),
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
    def of(
        cls,
        text: str,
        folder: Path,
        *arguments: str,
        under: Sequence[str] = (sys.executable,),
        environment: dict[str, str] | None = None,
    ) -> Program:
        """Start this Python text as a program, under this Python or another command."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "program.py").write_text(text)
        return cls([*under, "program.py", *arguments], folder, environment)

    @classmethod
    def serving(cls, text: str, folder: Path, *arguments: str, environment: dict[str, str] | None = None) -> Program:
        """Start this Python text as a program that serves (see `SERVE`), and wait until it is ready."""
        program = cls.of(text, folder, *arguments, environment=environment)
        program.hear("ready")
        return program

    def call(self, *order: Any, timeout: float = TIME_LIMIT) -> Any:
        """Call the function of a program that serves (see `SERVE`), and return the function's value."""
        self.tell(json.dumps(order))
        return json.loads(self.hear("done", timeout))

    def tell(self, line: str) -> None:
        """Write a line to the program's standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def hear(self, word: str, timeout: float = TIME_LIMIT) -> str:
        """Wait until the program prints this word, and return the rest of the line."""
        deadline = time.monotonic() + timeout
        while True:
            found, _, rest = self.hear_any(deadline - time.monotonic(), word).partition(" ")
            if found == f"@{word}":
                return rest.strip()

    def hear_any(self, timeout: float = TIME_LIMIT, word: str = "word") -> str:
        """Return the next line that the program prints. `word` is the expected word, for the errors."""
        try:
            line = self._heard.get(timeout=max(0.0, timeout))
        except queue.Empty:
            raise self.failure(f"printed no {word} in time") from None
        if line is None:
            raise self.failure(f"ended before its {word}")
        return line.strip()

    def has_ended(self) -> bool:
        """Return True if the process has ended."""
        return self._process.poll() is not None

    def has_spoken(self) -> bool:
        """Return True if the program has printed a line that was not read yet, or has ended."""
        return not self._heard.empty()

    def wait(self, timeout: float = TIME_LIMIT) -> int:
        """Wait for the program's end, and return its exit code."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise self.failure(f"did not end within {timeout:g} s") from None

    def kill(self) -> None:
        """Kill the program and all its descendants."""
        _kill_tree(self._process.pid)
        self._process.wait()

    def failure(self, what: str) -> SystemExit:
        """Return an error with the end of the program's log."""
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])
        return SystemExit(f"{self._what} {what}. The end of its log:\n{tail}")

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._heard.put(line)
        self._heard.put(None)


class Cluster:
    """Dask scheduler and workers with their nannies, in an empty directory."""

    def __init__(self, folder: Path, num_workers: int, *options: str) -> None:
        """Start the scheduler and the workers, with `options` for the workers, and wait for the registrations."""
        folder.mkdir(parents=True)
        self._folder, self._options = folder, options
        self._num_started = 0
        (folder / "note_workers.py").write_text(NOTE_WORKERS)
        options = ["--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--preload", "note_workers.py"]
        self.scheduler = self._start("scheduler", *options, "--scheduler-file", "contact.json")
        self.contact = str(folder / "contact.json")
        """Path of the file for `Client(scheduler_file=...)`."""
        self.nannies: list[int] = []
        for _ in range(num_workers):
            self.start_worker()
        self.wait_for(num_workers)

    def wait_for(self, num_workers: int) -> None:
        """Wait until this number of workers is registered."""
        until(lambda: len(self.workers()) == num_workers, f"{num_workers} workers; see {self._folder / 'log'}")

    def workers(self) -> dict[str, float]:
        """Return the addresses of the registered workers, with the times of their registrations."""
        registered: dict[str, float] = {}
        notes = self._folder / "workers"
        for line in notes.read_text().splitlines() if notes.exists() else []:
            sign, address, at = line.split()
            if sign == "+":
                registered[address] = float(at)
            else:
                registered.pop(address, None)
        return registered

    def lose(self, nanny: int) -> None:
        """Kill a worker with its nanny, as in the loss of a pod."""
        for pid in (nanny, worker_below(nanny)):
            kill(pid)
        self.nannies.remove(nanny)

    def add_worker(self) -> None:
        """Start another worker, and wait until it is registered."""
        self.start_worker()
        self.wait_for(len(self.nannies))

    def close(self) -> None:
        """Kill the cluster and all its descendants."""
        for pid in (*self.nannies, self.scheduler):
            _kill_tree(pid)
        _reap()

    def start_worker(self) -> None:
        """Start another worker."""
        self._num_started += 1
        name = f"worker-{self._num_started}"
        options = ["--nthreads", "1", "--memory-limit", "2Gi", "--no-dashboard", "--scheduler-file", "contact.json"]
        # A scheduler that is ending has removed its file. The worker notices by itself.
        until(
            lambda: read(self.contact).strip() or not is_running(self.scheduler),
            f"the scheduler; see {self._folder / 'log'}",
        )
        self.nannies.append(self._start("worker", "--name", name, *options, *self._options))

    def _start(self, kind: str, *options: str) -> int:
        # As on a backend: the task environment sets these variables, and the project's modules are not importable.
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
    """Return the child processes of a process."""
    return [int(child) for task in entries(f"/proc/{pid}/task") for child in read(f"{task}/children").split()]


def family(root: int) -> list[int]:
    """Return a process and all its descendants, also those with sessions of their own, such as ranks."""
    pids = [root]
    for pid in pids:
        pids += children_of(pid)
    return pids


def kill(pid: int, signum: int = signal.SIGKILL) -> bool:
    """Send a signal to a process. Return False if the process has ended."""
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return False
    return True


def state_of(pid: int) -> tuple[str, int, int]:
    """Return the state of a process as one letter, its parent and its session. Empty and 0 if the process has ended."""
    fields = read(f"/proc/{pid}/stat").rpartition(")")[2].split() or ["", "0", "0", "0"]
    return fields[0], int(fields[1]), int(fields[3])


def parent_of(pid: int) -> int:
    """Return the parent process. 0 if the process has ended."""
    return state_of(pid)[1]


def worker_of(rank: int) -> int:
    """Return the Dask worker beside which a rank runs."""
    return parent_of(parent_of(rank))  # the rank's parent is the worker's fork server


def worker_below(nanny: int) -> int:
    """Return the present worker of a nanny."""
    found = [pid for pid in children_of(nanny) if WORKER in read(f"/proc/{pid}/cmdline") and is_running(pid)]
    if not found:
        raise SystemExit(f"the nanny {nanny} has no worker")
    return found[0]


def is_running(pid: int) -> bool:
    """Return True if the process runs, and is not a zombie."""
    return state_of(pid)[0] not in ("", "Z")


def until(condition: Callable[[], object], what: str, timeout: float = TIME_LIMIT) -> None:
    """Wait for a condition, or exit with an error after the timeout."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {timeout:g} s for {what}")
        time.sleep(0.01)


_started: list[subprocess.Popen[bytes]] = []
"""Processes of this module. Python warns when it deletes a Popen object before the process's end."""


def started_here() -> list[int]:
    """Return all running processes that started inside `nothing_left`, including their descendants."""
    _reap()
    return _marked(os.environ[MARK])


def _marked(mark: str) -> list[int]:
    """Return the processes with the mark, except this process."""
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [
        pid
        for pid in pids
        if pid != os.getpid() and f"{MARK}={mark}" in read(f"/proc/{pid}/environ") and is_running(pid)
    ]


def _kill_tree(root: int) -> None:
    for pid in family(root):
        kill(pid)


def _reap() -> None:
    for process in _started:
        process.poll()


def entries(folder: str) -> list[Path]:
    """Return the entries of a process's folder. Empty if the process has ended."""
    try:
        return list(Path(folder).iterdir())
    except OSError:  # the process has gone
        return []


def read(path: str | Path) -> str:
    """Return the text of a process's file. Empty if the process has ended."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:  # the process has ended, or belongs to another user
        return ""
