"""How long until a gang trains: from its launch to the end of its first all-reduce, beside its peers.

    pip install '.[bench,flyte2]'                         # Ray and Flyte 2, for their rows
    python benchmarks/launch.py                           # five rounds, some ten minutes, a table at the end
    python benchmarks/launch.py --quick --skip ray        # one round: does it still run?
    python benchmarks/launch.py --backend nccl            # one rank per GPU, also where there is one GPU

Every launch ends in an all-reduce whose value is checked, and counts until its slowest rank has done it: of two ranks
with gloo, on the CPU, or of one rank per GPU with nccl, CUDA's own start included. Every round launches each row once,
in turn, and ratios are taken within a round, so that a busy minute of the machine bears on both sides. A round that is
not counted goes first: it warms the caches of files and the clusters.

Warm launches are asked of a process that is up, and has imported what it needs: `dispatch.run` on a running Dask
cluster (`dask scheduler` and `dask worker`, processes of their own: a worker for each rank, or one for all GPUs),
`torch.multiprocessing.spawn`, Ray Train on a running Ray (with gloo only). First gangs have a new cluster each, whose
workers wait, or have been told to preload what ranks need, and are up for 15 seconds. Cold ones begin with the start of
the command. `torchrun` knows only the cold way, and is the measure of all. The idle clusters run all the while, in the
background of every row.

This process imports nothing but the standard library; what is measured runs in processes of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from figures import Figure, Goal, reported

TIME_LIMIT = 180.0
"""Seconds for any one launch, or for a cluster to come up; the process is killed then."""
PAUSE = 0.5
"""Seconds between two launches, for the last one's processes to be gone."""
UP_FOR = 15.0
"""Seconds that workers are up before their first gang where they get ready for it."""
MARKS = "LAUNCH_MARKS"
"""Names the folder in which every rank notes when it has done its all-reduce."""
SIZE, BACKEND = "LAUNCH_SIZE", "LAUNCH_BACKEND"
"""How many ranks are launched, and what they meet by."""

# ---- What is launched: the same function in every rank, and how each launcher's users would write the rest ----------

JOIN = """
import os
import torch
from torch import distributed

def join(backend, local_rank, **others):
    device = torch.device("cuda", local_rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
        others["device_id"] = device
    distributed.init_process_group(backend, **others)
    return device
"""
"""How a script of one's own joins its process group, on a GPU of its own where the backend is nccl."""

MEET = f"""{JOIN}
import sys
import time

NUM_RANKS, BACKEND = int(os.environ["{SIZE}"]), os.environ["{BACKEND}"]
NUM_WORKERS = 1 if BACKEND == "nccl" else NUM_RANKS
RANKS_PER_WORKER = NUM_RANKS // NUM_WORKERS

def meet():
    rank = distributed.get_rank()
    total = torch.tensor([rank + 1.0], device="cuda" if BACKEND == "nccl" else "cpu")
    distributed.all_reduce(total)
    found = total.item()
    now = time.time()
    if found != sum(range(1, NUM_RANKS + 1)):
        raise ValueError(f"the all-reduce of {{NUM_RANKS}} ranks gave {{found}}")
    with open(os.path.join(os.environ["{MARKS}"], str(rank)), "w") as mark:
        mark.write(repr(now))
"""

SERVE = """
def serve(launch):
    print("@ready", flush=True)
    for _ in sys.stdin:
        launch()
        print("@over", flush=True)
"""

TORCHRUN = f"""{MEET}
join(BACKEND, int(os.environ["LOCAL_RANK"]))
meet()
distributed.destroy_process_group()
"""

PYFLYTE = f"""{MEET}
from flytekit import task
from flytekitplugins.daskpytorch import DaskDDP, Gang, WorkerGroup

workers, gang = WorkerGroup(number_of_workers=NUM_WORKERS), Gang(backend=BACKEND, ranks_per_worker=RANKS_PER_WORKER)

@task(task_config=DaskDDP(workers=workers, gang=gang))
def launch() -> None:
    meet()
"""

FLYTE = f"""{MEET}
import flyte
from flyteplugins.daskpytorch import DaskDDP, Gang, WorkerGroup

workers, gang = WorkerGroup(number_of_workers=NUM_WORKERS), Gang(backend=BACKEND, ranks_per_worker=RANKS_PER_WORKER)
env = flyte.TaskEnvironment("launching", plugin_config=DaskDDP(workers=workers, gang=gang))

@env.task
def launch() -> None:
    meet()
"""

DASK = f"""{MEET}{SERVE}
import subprocess
from distributed import Client
from flytekitplugins.daskpytorch import Gang, dispatch

def dask(*arguments):
    return subprocess.Popen([sys.executable, "-m", "dask", *arguments], stdin=subprocess.DEVNULL, stdout=sys.stderr)

address = os.path.join(os.environ["TMPDIR"], f"scheduler-{{os.getpid()}}.json")
cluster = [dask("scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", address)]
cluster += [dask("worker", "--no-dashboard", "--scheduler-file", address) for _ in range(NUM_WORKERS)]
gang = Gang(backend=BACKEND, ranks_per_worker=RANKS_PER_WORKER)
try:
    with Client(scheduler_file=address, timeout={TIME_LIMIT}) as client:
        client.wait_for_workers(NUM_WORKERS, timeout={TIME_LIMIT})
        serve(lambda: dispatch.run(client, meet, gang=gang).result(timeout={TIME_LIMIT}))
finally:
    for process in reversed(cluster):
        process.terminate()
        process.wait()
"""

PRELOADED = DASK.replace(
    '"worker", "--no-dashboard"', '"worker", "--preload", "flytekitplugins.daskpytorch.preload", "--no-dashboard"'
).replace("        serve(", f"        time.sleep({UP_FOR})\n        serve(")
"""The same, where workers get ready as soon as they start, and have had the time to."""

SPAWN = f"""{MEET}{SERVE}
import tempfile
import torch.multiprocessing

def rank(index, file):
    join(BACKEND, index, init_method=f"file://{{file}}", rank=index, world_size=NUM_RANKS)
    meet()
    distributed.destroy_process_group()

def launch():
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank, args=(f"{{folder}}/store",), nprocs=NUM_RANKS)

if __name__ == "__main__":
    serve(launch)
"""

RAY = f"""{MEET}{SERVE}
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

def launch():
    trainer = TorchTrainer(
        meet,
        torch_config=TorchConfig(backend=BACKEND),
        scaling_config=ScalingConfig(num_workers=NUM_RANKS, use_gpu=False),
        run_config=RunConfig(storage_path=os.path.join(os.environ["TMPDIR"], "results")),
    )
    trainer.fit()

# One logical CPU more than the ranks need, so that nothing of Ray's own waits for one; the dashboard makes it slower.
folder = os.path.join(os.environ["TMPDIR"], "ray")
ray.init("local", num_cpus=NUM_RANKS + 1, include_dashboard=False, _temp_dir=folder)
serve(launch)
ray.shutdown()
"""


# ---- Launching ------------------------------------------------------------------------------------------------------


class Launcher(Protocol):
    """Launches gangs of one kind."""

    def launch(self) -> float:
        """Seconds from the launch of a gang to the end of its first all-reduce; returns when the gang has gone."""

    def close(self) -> None:
        """Leave no process behind."""


class Child:
    """A process in a session of its own, with a folder for all that it writes."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self._marks = folder / "marks"
        self._log = folder / "log"
        for path in (self._marks, folder / "tmp"):
            path.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {
            MARKS: str(self._marks),
            "TMPDIR": str(folder / "tmp"),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # silences a warning
        }
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def tell(self) -> None:
        """Have it launch a gang."""
        assert self._process.stdin is not None
        self._process.stdin.write("launch\n")
        self._process.stdin.flush()

    def hear(self, word: str) -> None:
        """Wait until it says that word."""
        assert self._process.stdout is not None
        with self._time_limit():
            if not any(line == f"@{word}\n" for line in self._process.stdout):
                raise self._failure(f"ended, or took longer than {TIME_LIMIT:g} s, before it was {word}")

    def finish(self) -> None:
        """Wait for its end, which must be a good one."""
        with self._time_limit():
            output, _ = self._process.communicate()
        self.kill()
        with self._log.open("a") as log:
            log.write(output)
        if self._process.returncode:
            raise self._failure(f"ended with exit code {self._process.returncode}")

    def met_at(self) -> float:
        """When the slowest rank had done its all-reduce; forgets it then."""
        marks = [self._marks / str(rank) for rank in range(int(os.environ[SIZE]))]
        if missing := [mark.name for mark in marks if not mark.exists()]:
            raise self._failure(f"did no all-reduce in rank {', '.join(missing)}")
        times = [float(mark.read_text()) for mark in marks]
        for mark in marks:
            mark.unlink()
        return max(times)

    def kill(self) -> None:
        """End what is left of its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    @contextlib.contextmanager
    def _time_limit(self) -> Iterator[None]:
        timer = threading.Timer(TIME_LIMIT, self.kill)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _failure(self, what: str) -> SystemExit:
        self.kill()
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-30:])
        return SystemExit(f"{self._log.parent / 'program.py'} {what}. The end of its log:\n{tail}")


@dataclass
class Command:
    """A command that launches one gang and ends with it; the clock starts with the command."""

    command: list[str]
    folder: Path

    def launch(self) -> float:
        started_at = time.time()
        child = Child(self.command, self.folder)
        try:
            child.finish()
        finally:
            child.kill()
        return child.met_at() - started_at

    def close(self) -> None:
        pass


@dataclass
class Driver:
    """A process that is up and launches gangs when it is told to; the clock starts with the telling."""

    command: list[str]
    folder: Path
    stays: bool = True
    """Whether it, and its cluster, serve for all launches; else for one."""
    _child: Child | None = field(default=None, init=False)

    def launch(self) -> float:
        child, self._child = self._child or self._start(), None
        try:
            started_at = time.time()
            child.tell()
            child.hear("over")
            seconds = child.met_at() - started_at
        except BaseException:
            child.kill()
            raise
        self._child = child
        if not self.stays:
            self.close()
        return seconds

    def close(self) -> None:
        if self._child is not None:
            child, self._child = self._child, None
            child.finish()

    def _start(self) -> Child:
        child = Child(self.command, self.folder)
        try:
            child.hear("ready")
        except BaseException:
            child.kill()
            raise
        return child


# ---- The rows -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    """For `--skip`."""
    label: str
    make: Callable[[Path], Launcher]
    """Its launcher, with a folder of its own."""


ROWS = (
    Row("torchrun", "`torchrun --standalone`, which is always cold", lambda at: Command(torchrun(at), at)),
    Row("warm", "**`dispatch.run`, warm**", lambda at: Driver(script(at, DASK), at)),
    Row("spawn", "`torch.multiprocessing.spawn`, warm", lambda at: Driver(script(at, SPAWN), at)),
    Row("ray", "Ray Train `fit()`, warm", lambda at: Driver(script(at, RAY), at)),
    Row("fresh", "**`dispatch.run`, first gang on a cluster**", lambda at: Driver(script(at, DASK), at, stays=False)),
    Row(
        "preload",
        "**`dispatch.run`, first gang on workers that preload**",
        lambda at: Driver(script(at, PRELOADED), at, stays=False),
    ),
    Row("pyflyte", "**`pyflyte run`, cold**", lambda at: Command(pyflyte(at), at)),
    Row("flyte", "**`flyte run --local`, cold**", lambda at: Command(flyte2(at), at)),
)
TORCHRUN_ROW, WARM_ROW, _, RAY_ROW, FRESH_ROW, PRELOAD_ROW, PYFLYTE_ROW, FLYTE_ROW = ROWS


def torchrun(folder: Path) -> list[str]:
    """A `torchrun` command line."""
    return [
        console_script("torchrun"),
        "--standalone",
        f"--nproc-per-node={os.environ[SIZE]}",
        written(folder, TORCHRUN),
    ]


def pyflyte(folder: Path) -> list[str]:
    """A local `pyflyte run` command line."""
    return [console_script("pyflyte"), "run", written(folder, PYFLYTE), "launch"]


def flyte2(folder: Path) -> list[str]:
    """A `flyte run --local` command line."""
    return [console_script("flyte"), "run", "--local", written(folder, FLYTE), "launch"]


def script(folder: Path, text: str) -> list[str]:
    """A command line that runs that Python text."""
    return [sys.executable, written(folder, text)]


def written(folder: Path, text: str) -> str:
    """The name of a file in the folder with that text."""
    (folder / "program.py").write_text(text)
    return "program.py"


def console_script(name: str) -> str:
    """Where this Python's installation has that command; else the first on the PATH."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    if found := shutil.which(name, path=path):
        return found
    raise SystemExit(f"there is no {name} beside {sys.executable}, nor on the PATH; pip install the package first")


# ---- Measuring and reporting ----------------------------------------------------------------------------------------

Times = dict[Row, list[float]]


def measure(rows: list[Row], num_rounds: int, folder: Path) -> Times:
    """The seconds of every row, a list with one entry per round."""
    times: Times = {row: [] for row in rows}
    with contextlib.ExitStack() as stack:
        launchers = {}
        for number, row in enumerate(rows):
            (here := folder / str(number)).mkdir()
            launchers[row] = stack.enter_context(contextlib.closing(row.make(here)))
        for number in range(num_rounds + 1):
            for row, launcher in launchers.items():
                seconds = launcher.launch()
                counts = f"round {number} of {num_rounds}" if number else "not counted"
                print(f"{counts}: {row.label.replace('*', '')}: {seconds:.3f} s", file=sys.stderr)
                if number:
                    times[row].append(seconds)
                time.sleep(PAUSE)
    return times


def ratio(times: Times, slow: Row, fast: Row) -> float:
    """How many times as long one takes as the other: the median over the rounds."""
    return statistics.median(s / f for s, f in zip(times[slow], times[fast], strict=True))


def table(times: Times) -> Iterator[str]:
    """The lines of a Markdown table."""
    what = f"{os.environ[BACKEND]}, ranks: {os.environ[SIZE]}"
    yield f"| launch to first all-reduce, {what} | median | min–max | times as fast as `torchrun` |"
    yield "|---|---|---|---|"
    for row, seconds in times.items():
        spread = f"{min(seconds):.3g}–{max(seconds):.3g} s"
        speed = ratio(times, TORCHRUN_ROW, row)
        yield f"| {row.label} | {statistics.median(seconds):.3g} s | {spread} | {speed:.2g}× |"


def figures(times: Times) -> Iterator[Figure]:
    """What was to be reached, and what was; nobody can start CUDA in the time that a warm gang has for its launch."""
    gang = f"{os.environ[SIZE]} ranks ({os.environ[BACKEND]}), launch to first all-reduce"
    peer, theirs = "`torchrun`", times[TORCHRUN_ROW]
    if WARM_ROW in times:
        goals = [Goal(bound=0.03, of="here", at_most=True), Goal(bound=100)] if os.environ[BACKEND] == "gloo" else []
        yield Figure.beside(peer, theirs, what=f"{gang}, warm", here=times[WARM_ROW], goals=goals)
    if WARM_ROW in times and RAY_ROW in times:
        what = f"{gang}, warm, beside Ray Train on a running Ray"
        yield Figure.beside("Ray Train", times[RAY_ROW], what=what, here=times[WARM_ROW], goals=[Goal(bound=250)])
    for row, cluster in ((FRESH_ROW, "a cluster"), (PRELOAD_ROW, "workers that preload")):
        if row in times:
            goals = [Goal(bound=1.0, of="here", at_most=True)]
            yield Figure.beside(peer, theirs, what=f"{gang}, first gang on {cluster}", here=times[row], goals=goals)
    for row, command in ((PYFLYTE_ROW, "`pyflyte run`"), (FLYTE_ROW, "`flyte run --local`")):
        if row in times:
            goals = [Goal(bound=0.8, at_most=True)]
            yield Figure.beside(peer, theirs, share=True, what=f"{gang}, cold {command}", here=times[row], goals=goals)


def verdict(reached: bool) -> str:
    """A goal's outcome in a word."""
    return "reached" if reached else "missed"


def machine() -> str:
    """What this was measured on, and when."""
    packages = ("flytekitplugins-daskpytorch", "torch", "distributed", "flytekit", "flyte", "ray")
    versions = ", ".join(f"{name} {version_of(name)}" for name in packages)
    return (
        f"{time.strftime('%Y-%m-%d')}; {len(os.sched_getaffinity(0))} cores, {cpu_model()}, {gpu_models()}, "
        f"load {os.getloadavg()[0]:.1f} before the start; Python {platform.python_version()}, {versions}"
    )


def version_of(package: str) -> str:
    """Its version; a dash where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "–"


def cpu_model() -> str:
    """The processor's name, as Linux has it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


@functools.cache
def gpus() -> list[str]:
    """The models of the GPUs that torch sees. It is asked in a process of its own, as this one does not import it."""
    if not Path("/dev/nvidiactl").exists():
        return []
    question = """if True:
        import json, torch
        print(json.dumps([torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]))
    """
    return list(json.loads(subprocess.run([sys.executable, "-c", question], stdout=subprocess.PIPE, check=True).stdout))


def gpu_models() -> str:
    """How many GPUs of which kind."""
    counts = Counter(gpus())
    return ", ".join(f"{count} x {model}" for model, count in counts.items()) or "no GPU"


def chosen(skipped: list[str]) -> list[Row]:
    """The rows to measure; `torchrun` always, since all others are held against it."""
    if os.environ[BACKEND] == "nccl":
        skipped = [*skipped, "ray"]
    if "ray" not in skipped and find_spec("ray") is None:
        print("Ray is not installed, its row is skipped: pip install '.[bench]'", file=sys.stderr)
        skipped = [*skipped, "ray"]
    if find_spec("flyte") is None:
        print("Flyte 2 is not installed, its row is skipped: pip install '.[flyte2]'", file=sys.stderr)
        skipped = [*skipped, "flyte"]
    return [row for row in ROWS if row.name not in skipped]


def main() -> None:
    """Measure, then print the machine, the table and the goals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="how often each row is launched (default: 5)"
    )
    parser.add_argument("--quick", action="store_true", help="one round: does it still run?")
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo", help="(default: gloo, on the CPU)")
    names = sorted({row.name for row in ROWS} - {"torchrun"})
    parser.add_argument("--skip", nargs="+", default=[], choices=names, help="rows to leave out")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds}: must be 1 or more")
    if arguments.backend == "nccl" and not gpus():
        parser.error("--backend nccl: torch sees no GPU here; look at nvidia-smi and CUDA_VISIBLE_DEVICES")
    os.environ |= {BACKEND: arguments.backend, SIZE: str(len(gpus()) if arguments.backend == "nccl" else 2)}

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the clusters are ended then, too
    on_what = machine()
    with tempfile.TemporaryDirectory(prefix="launch-", ignore_cleanup_errors=True) as folder:
        times = measure(chosen(arguments.skip), 1 if arguments.quick else arguments.rounds, Path(folder))
    print(on_what, "", *table(times), "", *reported(figures(times)), sep="\n")


if __name__ == "__main__":
    main()
