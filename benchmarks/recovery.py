"""What a failure costs: seconds until the ranks train again, and whether the right rank and cause are named.

    python benchmarks/recovery.py                         # five rounds, a quarter of an hour, two tables at the end
    python benchmarks/recovery.py --quick                 # one round: does it still run?
    python benchmarks/recovery.py --only rank             # a part of it; --skip leaves parts out

The parts, each with two ranks on the CPU:

rank      A rank is killed (SIGKILL). The seconds end when the slower rank has done its first optimizer step in the
          next attempt, from a checkpoint. `dispatch.run` on a running Dask cluster, and `torchrun --max-restarts`
          with a checkpoint file that rank 0 writes; the same model, data, steps and checkpoint interval. `torchrun`
          runs with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which a restart of gloo ranks often fails.
lost      A worker is killed with its nanny, as when its pod is lost, and the other is enough (`min_workers=1`).
returned  A worker is killed alone, and all are needed: its nanny brings a new one. Also without the time until that is
          registered, which is Dask's.
blame     Faults whose consequences hide the cause, in either rank: how often is the guilty rank named, with what it
          did? `dispatch.run`, `torchrun` (its report, with `@record` in the script) and `torch.multiprocessing.spawn`.

Every round does each of the first three once, in turn, and ratios are taken within a round. A round that is not counted
goes first. Before it is hit, every gang has trained for eight seconds. The idle Dask cluster runs in the background
of all.

This process imports nothing but the standard library; what is measured runs in processes of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from figures import Figure, Goal, reported
from launch import console_script, machine
from running import Cluster, Program, nothing_left, until

NUM_RANKS = 2
WARM_UP = 8.0
"""Seconds of training before a fault: whatever a launcher prepares in the background is ready then."""
TIME_LIMIT = 120.0
"""Seconds for a gang to start, or to train again."""
HANG_TIMEOUT = 6.0
"""Seconds after which a hang shows: by the watchdog, or by the process group's time-out where there is none."""

# ---- What is run ----------------------------------------------------------------------------------------------------

TRAIN = """
import os
import sys
import time
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

SAVE_INTERVAL = 10
PACE = 0.01

def train(folder, load, save):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank = distributed.get_rank()
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    gang_model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters())
    step = 0
    if (state := load()) is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    with open(os.path.join(folder, f"steps-{rank}"), "a", buffering=1) as notes:
        while True:
            step += 1
            inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(1000 * step + rank))
            optimizer.zero_grad()
            nn.functional.mse_loss(gang_model(inputs), inputs).backward()
            optimizer.step()
            notes.write(f"{os.getpid()} {step} {time.time()!r}\\n")
            if step % SAVE_INTERVAL == 0:
                save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, step)
            time.sleep(PACE)
"""

TORCHRUN = f"""{TRAIN}
FILE = "checkpoint.pt"

def load():
    return torch.load(FILE, weights_only=True) if os.path.exists(FILE) else None

def save(state, step):
    if distributed.get_rank() == 0:
        torch.save(state, f"{{FILE}}.new")
        os.replace(f"{{FILE}}.new", FILE)

distributed.init_process_group("gloo")
train(".", load, save)
"""

DASK = f"""{TRAIN}
from distributed import Client
from flytekitplugins.daskpytorch import Gang, current_rank, dispatch

def rank(folder):
    checkpoint = current_rank().checkpoint
    train(folder, checkpoint.load, checkpoint.save)

with Client(scheduler_file=sys.argv[1]) as client:
    print("@ready", flush=True)
    for line in sys.stdin:
        folder, min_workers = line.split()
        gang = dispatch.run(client, rank, folder, gang=Gang(min_workers=int(min_workers)))
        sys.stdin.readline()
        if gang.done():
            raise gang.exception()
        gang.cancel()
        gang.exception()
        print("@over", flush=True)
"""

FAULTS = """
import ctypes
import json
import os
import resource
import sys
import time
import torch
from torch import distributed

class SpoiltError(Exception):
    pass

def fail(fault):
    match fault:
        case "raise":
            raise SpoiltError("the batch is spoilt")
        case "close":
            distributed.destroy_process_group()
            time.sleep(0.2)  # the others' connection errors come first
            raise SpoiltError("the batch is spoilt")
        case "segfault":
            ctypes.string_at(0)
        case "exit":
            os._exit(3)
        case "memory":
            with open("/proc/self/statm") as file:
                used = int(file.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
            bytearray(1 << 30)
        case "hang":
            time.sleep(600)

def train(fault, guilty):
    for step in range(20):
        if step == 10 and distributed.get_rank() == int(guilty):
            fail(fault)
        distributed.all_reduce(torch.ones(1000))
"""

BLAME_TORCHRUN = f"""{FAULTS}
from datetime import timedelta
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main(fault, guilty):
    limit = {{"timeout": timedelta(seconds={HANG_TIMEOUT})}} if fault == "hang" else {{}}
    distributed.init_process_group("gloo", **limit)
    train(fault, guilty)

main(*sys.argv[1:])
"""

BLAME_SPAWN = f"""{FAULTS}
import tempfile
from datetime import timedelta
from torch import multiprocessing

def rank(index, file, fault, guilty):
    limit = {{"timeout": timedelta(seconds={HANG_TIMEOUT})}} if fault == "hang" else {{}}
    store = f"file://{{file}}"
    distributed.init_process_group("gloo", init_method=store, rank=index, world_size={NUM_RANKS}, **limit)
    train(fault, guilty)

if __name__ == "__main__":
    print("@ready", flush=True)
    for line in sys.stdin:
        with tempfile.TemporaryDirectory() as folder:
            try:
                multiprocessing.spawn(rank, args=(f"{{folder}}/store", *line.split()), nprocs={NUM_RANKS})
            except (multiprocessing.ProcessRaisedException, multiprocessing.ProcessExitedException) as error:
                print("@blamed", json.dumps([error.error_index, str(error)]), flush=True)
"""

BLAME_DASK = f"""{FAULTS}
from distributed import Client
from flytekitplugins.daskpytorch import Gang, GangError, dispatch

with Client(scheduler_file=sys.argv[1]) as client:
    print("@ready", flush=True)
    for line in sys.stdin:
        settings = Gang(max_restarts=0, hang_timeout={HANG_TIMEOUT})
        error = dispatch.run(client, train, *line.split(), gang=settings).exception()
        report = error if isinstance(error, GangError) else error.__cause__
        print("@blamed", json.dumps([report.rank, report.cause]), flush=True)
"""

# ---- Time to train again --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One optimizer step, as its rank noted it."""

    pid: int
    number: int
    time: float


@dataclass(frozen=True)
class Notes:
    """What the ranks of one gang write down."""

    folder: Path

    def steps(self, rank: int) -> list[Step]:
        """The steps of all the attempts of a rank."""
        path = self.folder / f"steps-{rank}"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        whole = (line.split() for line in lines if line.endswith("\n"))
        return [Step(int(pid), int(number), float(at)) for pid, number, at in whole]

    def wait_until_warm(self, program: Program) -> list[int]:
        """Until all ranks have trained for long enough; their pids."""

        def is_warm() -> bool:
            everyone = [self.steps(rank) for rank in range(NUM_RANKS)]
            check_runs(program)
            return all(steps and steps[-1].time - steps[0].time >= WARM_UP for steps in everyone)

        until(is_warm, "the ranks to train", TIME_LIMIT)
        return [self.steps(rank)[-1].pid for rank in range(NUM_RANKS)]

    def wait_until_resumed(self, program: Program, old_pids: list[int], num_ranks: int) -> float:
        """Until all ranks have done a step in a new process; when the slowest had."""
        first: dict[int, Step] = {}

        def has_resumed() -> bool:
            check_runs(program)
            for rank in range(num_ranks):
                new = [step for step in self.steps(rank) if step.pid not in old_pids]
                first.update({rank: new[0]} if new else {})
            return len(first) == num_ranks

        until(has_resumed, "the ranks to train again", TIME_LIMIT)
        if any(step.number == 1 for step in first.values()):
            raise program.failure("started again from the beginning instead of from a checkpoint")
        return max(step.time for step in first.values())


def check_runs(program: Program) -> None:
    """Fail early where there is nothing to wait for."""
    if program.has_spoken():
        raise program.failure("ended, or let its gang end")


@dataclass
class Bench:
    """The cluster, and the process that launches gangs on it."""

    folder: Path
    cluster: Cluster
    driver: Program
    num_gangs: int = 0

    @contextlib.contextmanager
    def gang(self, min_workers: int = NUM_RANKS) -> Iterator[Notes]:
        """A gang that trains until the end of the context."""
        folder = self.next_folder()
        self.driver.tell(f"{folder} {min_workers}")
        yield Notes(folder)
        self.driver.tell("cancel")
        self.driver.hear("over")

    def next_folder(self) -> Path:
        """An empty one."""
        self.num_gangs += 1
        (folder := self.folder / str(self.num_gangs)).mkdir()
        return folder


Seconds = dict[str, float]
"""Row of the table -> what was measured in one round."""

TORCHRUN_ROW = "rank killed: `torchrun --max-restarts`"
RANK_ROW = "**rank killed: `dispatch.run`**"
LOST_ROW = "**worker lost, the others go on: `dispatch.run`**"
RETURNED_ROW = "**worker killed, its nanny brings a new one: `dispatch.run`**"
REGISTERED_ROW = "of that, after the new worker was registered"


def kill_a_rank(bench: Bench, number: int) -> Seconds:
    """The part `rank`, for both launchers."""
    folder = bench.next_folder()
    (folder / "program.py").write_text(TORCHRUN)
    options = ["--standalone", f"--nproc-per-node={NUM_RANKS}", "--max-restarts=3"]
    # Else torch 2.15 keeps one store for all attempts, and gloo finds the addresses of the dead ranks in it: it
    # fails once more, or waits for minutes.
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    program = Program([console_script("torchrun"), *options, "program.py"], folder, own_store)
    try:
        peer = recovery(program, Notes(folder), number)
    finally:
        program.kill()
    with bench.gang() as notes:
        return {TORCHRUN_ROW: peer, RANK_ROW: recovery(bench.driver, notes, number)}


def recovery(program: Program, notes: Notes, number: int) -> float:
    """Seconds from the kill of a rank to the next step of all."""
    pids = notes.wait_until_warm(program)
    killed_at = time.time()
    os.kill(pids[number % NUM_RANKS], signal.SIGKILL)
    return notes.wait_until_resumed(program, pids, NUM_RANKS) - killed_at


def lose_a_worker(bench: Bench, number: int) -> Seconds:
    """The part `lost`."""
    with bench.gang(min_workers=NUM_RANKS - 1) as notes:
        pids = notes.wait_until_warm(bench.driver)
        killed_at = time.time()
        bench.cluster.lose(bench.cluster.nannies[number % NUM_RANKS])
        seconds = notes.wait_until_resumed(bench.driver, pids, NUM_RANKS - 1) - killed_at
    bench.cluster.add_worker()
    return {LOST_ROW: seconds}


def kill_a_worker(bench: Bench, number: int) -> Seconds:
    """The part `returned`."""
    with bench.gang() as notes:
        pids = notes.wait_until_warm(bench.driver)
        killed_at = time.time()
        os.kill(bench.cluster.worker_pid(bench.cluster.nannies[number % NUM_RANKS]), signal.SIGKILL)
        resumed_at = notes.wait_until_resumed(bench.driver, pids, NUM_RANKS)
        registered_at = max(bench.cluster.workers().values())
    return {RETURNED_ROW: resumed_at - killed_at, REGISTERED_ROW: resumed_at - registered_at}


PARTS: dict[str, Callable[[Bench, int], Seconds]] = {
    "rank": kill_a_rank,
    "lost": lose_a_worker,
    "returned": kill_a_worker,
}


def measure(parts: Iterable[str], num_rounds: int, folder: Path, cluster: Cluster) -> list[Seconds]:
    """One entry per round."""
    driver = Program.of(DASK, folder / "driver", cluster.contact)
    driver.hear("ready")
    bench = Bench(folder, cluster, driver)
    rounds: list[Seconds] = []
    for number in range(num_rounds + 1):
        counts = f"round {number} of {num_rounds}" if number else "not counted"
        rounds.append({})
        for part in parts:
            measured = PARTS[part](bench, number)
            rounds[-1] |= measured
            for row, seconds in measured.items():
                print(f"{counts}: {plain(row)}: {seconds:.3f} s", file=sys.stderr)
    driver.kill()
    return rounds[1:]


def table(rounds: list[Seconds]) -> Iterator[str]:
    """The lines of a Markdown table."""
    yield f"| {NUM_RANKS} ranks, fault to all ranks' next step | median | min–max | times as fast as `torchrun` |"
    yield "|---|---|---|---|"
    for row in rounds[0]:
        seconds = [measured[row] for measured in rounds]
        if TORCHRUN_ROW not in rounds[0]:
            speed = "not measured"
        elif row in (TORCHRUN_ROW, RANK_ROW):
            speed = f"{ratio(rounds):.2g}×" if row == RANK_ROW else "1×"
        else:
            speed = "on one node it has no such thing"
        yield f"| {row} | {statistics.median(seconds):.3g} s | {min(seconds):.3g}–{max(seconds):.3g} s | {speed} |"


def figures(rounds: list[Seconds]) -> Iterator[Figure]:
    """What was to be reached, and what was."""
    limits = {RANK_ROW: 0.05, LOST_ROW: 0.3, REGISTERED_ROW: 0.4}
    for row, limit in limits.items():
        if row not in rounds[0]:
            continue
        what, here = f"{plain(row)}, to all ranks' next step", [measured[row] for measured in rounds]
        goals = [Goal(bound=limit, of="here", at_most=True)]
        if row == RANK_ROW and TORCHRUN_ROW in rounds[0]:
            theirs = [measured[TORCHRUN_ROW] for measured in rounds]
            yield Figure.beside("`torchrun`", theirs, what=what, here=here, goals=[*goals, Goal(bound=4)])
        else:
            yield Figure(what=what, here=here, goals=goals)


def ratio(rounds: list[Seconds]) -> float:
    """How many times as long `torchrun` takes: the median over the rounds."""
    return statistics.median(measured[TORCHRUN_ROW] / measured[RANK_ROW] for measured in rounds)


def plain(row: str) -> str:
    """Without Markdown's asterisks."""
    return row.replace("*", "")


# ---- Blame ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A fault, and the words without which its cause is not named."""

    fault: str
    label: str
    cause: str


CASES = (
    Case("close", "raises after it has closed its process group", "SpoiltError"),
    Case("raise", "raises while the other is in an all-reduce", "SpoiltError"),
    Case("segfault", "segmentation fault", "SIGSEGV"),
    Case("exit", "`os._exit(3)`", r"exit ?code\s*:?\s*3\b"),
    Case("memory", "`MemoryError`", "MemoryError"),
    Case("hang", "hangs", r"hangs|(?i:timed? ?out)"),
)

Blamed = tuple[int | None, str]
"""The rank that a launcher names, and what it says of it."""


def blame_by_torchrun(folder: Path, case: Case, guilty: int) -> Blamed:
    """Read its report."""
    folder.mkdir()
    (folder / "program.py").write_text(BLAME_TORCHRUN)
    options = ["--standalone", f"--nproc-per-node={NUM_RANKS}"]
    program = Program([console_script("torchrun"), *options, "program.py", case.fault, str(guilty)], folder)
    if not program.wait():
        raise program.failure("ended as if nothing had been")
    report = program.log.read_text(errors="replace").rpartition("Root Cause (first observed failure):")[2]
    found = re.search(r"rank\s*: (\d+)", report)
    return (int(found[1]) if found else None), report


def blame_by(driver: Program, case: Case, guilty: int) -> Blamed:
    """Ask one of the processes that stay."""
    driver.tell(f"{case.fault} {guilty}")
    rank, text = json.loads(driver.hear("blamed"))
    return rank, text


def judge(num_repeats: int, folder: Path, cluster: Cluster) -> dict[Case, dict[str, int]]:
    """How often each launcher was right in each case."""
    spawn = Program.of(BLAME_SPAWN, folder / "spawn")
    dask = Program.of(BLAME_DASK, folder / "dask", cluster.contact)
    for driver in (spawn, dask):
        driver.hear("ready")
    numbers = iter(range(sys.maxsize))
    launchers: dict[str, Callable[[Case, int], Blamed]] = {
        "**`dispatch.run`**": lambda case, guilty: blame_by(dask, case, guilty),
        "`torchrun`": lambda case, guilty: blame_by_torchrun(folder / f"torchrun-{next(numbers)}", case, guilty),
        "`mp.spawn`": lambda case, guilty: blame_by(spawn, case, guilty),
    }
    right = {case: dict.fromkeys(launchers, 0) for case in CASES}
    for number in range(num_repeats):
        guilty = (number + 1) % NUM_RANKS
        for case in CASES:
            for name, blame in launchers.items():
                rank, text = blame(case, guilty)
                is_right = rank == guilty and re.search(case.cause, text) is not None
                right[case][name] += is_right
                said = "right" if is_right else f"wrong: rank {rank}, {summary(text)}"
                print(f"rank {guilty} {case.label}: {plain(name)}: {said}", file=sys.stderr)
    return right


def summary(text: str) -> str:
    """The last line that says something, for people."""
    lines = [line.strip() for line in text.splitlines() if any(character.isalpha() for character in line)]
    return lines[-1][:200] if lines else "nothing"


def blame_table(right: dict[Case, dict[str, int]], num_repeats: int) -> Iterator[str]:
    """The lines of a Markdown table."""
    names = list(right[CASES[0]])
    yield f"| guilty rank and cause named | {' | '.join(names)} |"
    yield "|---|" + "---|" * len(names)
    for case, counts in right.items():
        yield f"| {case.label} | {' | '.join(f'{counts[name]} of {num_repeats}' for name in names)} |"
    totals = {name: sum(counts[name] for counts in right.values()) for name in names}
    most = num_repeats * len(CASES)
    yield f"| all | {' | '.join(f'{totals[name]} of {most}' for name in names)} |"
    yield ""
    peers = " and ".join(f"{plain(name)} {totals[name]}" for name in names[1:])
    goals = [Goal(bound=most, of="here")]
    what = f"guilty rank and cause named, of {most}"
    yield from reported([Figure(what=what, here=[totals[names[0]]], unit="", peer=peers, goals=goals)])


def main() -> None:
    """Measure, then print the machine, the tables and the goals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*PARTS, "blame"]
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="how often each is measured (default: 5)")
    parser.add_argument("--repeats", type=int, default=4, metavar="N", help="how often each case of blame (default: 4)")
    parser.add_argument("--quick", action="store_true", help="one round, each case once: does it still run?")
    parser.add_argument("--skip", nargs="+", default=[], choices=names, help="parts to leave out")
    parser.add_argument("--only", nargs="+", default=names, choices=names, help="parts to measure")
    arguments = parser.parse_args()
    if min(arguments.rounds, arguments.repeats) < 1:
        parser.error("--rounds and --repeats must be 1 or more")
    num_rounds, num_repeats = (1, 1) if arguments.quick else (arguments.rounds, arguments.repeats)
    chosen = [name for name in names if name in arguments.only and name not in arguments.skip]
    parts = [name for name in chosen if name in PARTS]

    lines = [machine()]
    with nothing_left("recovery") as folder:
        cluster = Cluster(folder / "cluster", NUM_RANKS)
        if parts:
            rounds = measure(parts, num_rounds, folder, cluster)
            lines += ["", *table(rounds), "", *reported(figures(rounds))]
        if "blame" in chosen:
            lines += ["", *blame_table(judge(num_repeats, folder, cluster), num_repeats)]
    print(*lines, sep="\n")


if __name__ == "__main__":
    main()
