"""How long it takes to get the prompt back: from the last step, or from Ctrl-C, to the end of the command.

    python benchmarks/ending.py                # five rounds, some minutes, a table at the end
    python benchmarks/ending.py --quick        # one round: does it still run?

Twenty tiny steps of two ranks on the CPU, by `torchrun --standalone` and by local `pyflyte run`s of the same function,
with a Deck and without, on Dask and on the own node. The seconds begin when rank 0 has done its last step, or when
Ctrl-C is sent to a training that would go on for minutes. Every round does each once, in turn; the first does
not count.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from figures import Figure, Goal, reported
from launch import console_script, machine

MARK = "BENCHMARK_MARK"
"""Names the file into which rank 0 writes the time after each step."""
TIME_LIMIT = 120.0

TRAIN = f"""
import os
import time
import torch
from torch.nn.parallel import DistributedDataParallel


def train(num_steps, pause=0.0):
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(num_steps):
        loss = model(torch.randn(64, 2)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss, step, num_steps)
        time.sleep(pause)
        if int(os.environ["RANK"]) == 0:
            with open(os.environ["{MARK}"], "w") as mark:
                mark.write(str(time.time()))
    return float(loss)
"""

TORCHRUN = f"""{TRAIN}
from torch import distributed

def log(*_): pass

distributed.init_process_group("gloo")
train(20)
distributed.destroy_process_group()
"""

PYFLYTE = f"""{TRAIN}
from flytekit import task
from flytekitplugins.daskpytorch import DaskDDP, SpawnDDP, WorkerGroup, current_rank

DASK, NODE = DaskDDP(workers=WorkerGroup(number_of_workers=2)), SpawnDDP(nproc=2)

def log(loss, step, num_steps):
    current_rank().log({{"loss": loss.item()}}, step=step, num_steps=num_steps)

@task(task_config=DASK, enable_deck=True)
def dask_deck(num_steps: int = 20, pause: float = 0.0) -> float: return train(num_steps, pause)

@task(task_config=DASK)
def dask(num_steps: int = 20, pause: float = 0.0) -> float: return train(num_steps, pause)

@task(task_config=NODE, enable_deck=True)
def node_deck(num_steps: int = 20, pause: float = 0.0) -> float: return train(num_steps, pause)
"""

ENDLESS = ["--num_steps", "100000", "--pause", "0.05"]


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    label: str
    command: tuple[str, ...]
    is_interrupted: bool = False


def rows() -> list[Row]:
    """What is measured, `torchrun` first."""
    pyflyte = (console_script("pyflyte"), "run", "program.py")
    return [
        Row("`torchrun --standalone`", (console_script("torchrun"), "--standalone", "--nproc-per-node=2", "script.py")),
        Row("`pyflyte run`, `DaskDDP`", (*pyflyte, "dask")),
        Row("`pyflyte run`, `DaskDDP`, with a Deck", (*pyflyte, "dask_deck")),
        Row("`pyflyte run`, `SpawnDDP`, with a Deck", (*pyflyte, "node_deck")),
        Row("Ctrl-C, `DaskDDP`, with a Deck", (*pyflyte, "dask_deck", *ENDLESS), is_interrupted=True),
    ]


def seconds_of(row: Row, folder: Path) -> float:
    """Seconds from the last step, or from Ctrl-C, to the end of the command."""
    mark = folder / "mark"
    (folder / "script.py").write_text(TORCHRUN)
    (folder / "program.py").write_text(PYFLYTE)
    with started(row.command, folder) as process:
        began_at = wait_and_interrupt(process, mark) if row.is_interrupted else None
        code = process.wait(TIME_LIMIT)
        ended_at = time.time()
    if not mark.exists() or (code != 0) != row.is_interrupted:
        raise SystemExit(f"{row.label} ended with {code}:\n{(folder / 'log').read_text()}")
    return ended_at - (began_at or float(mark.read_text()))


@contextlib.contextmanager
def started(command: Sequence[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a training of `TRAIN`, which marks its steps and writes its log there; killed if it still runs."""
    mark = folder / "mark"
    mark.unlink(missing_ok=True)
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=os.environ | {MARK: str(mark)}, stdout=log, stderr=log, start_new_session=True
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def wait_and_interrupt(process: subprocess.Popen[bytes], mark: Path) -> float:
    """Send Ctrl-C two seconds after the first step; when that was."""
    deadline = time.monotonic() + TIME_LIMIT
    while not mark.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(2.0)
    process.send_signal(signal.SIGINT)
    return time.time()


def measured(rows: list[Row], seconds: Callable[[Row, Path], float], about: str | None) -> dict[Row, list[float]]:
    """What each takes, in as many rounds as the command line says; the first one does not count."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="(default: 5)")
    parser.add_argument("--quick", action="store_true", help="one round")
    arguments = parser.parse_args()
    times: dict[Row, list[float]] = {row: [] for row in rows}
    with tempfile.TemporaryDirectory(prefix="benchmark-", ignore_cleanup_errors=True) as folder:
        for number in range((1 if arguments.quick else arguments.rounds) + 1):
            for row, taken in times.items():
                taken.append(seconds(row, Path(folder)))
                print(f"round {number}: {row.label}: {taken[-1]:.2f} s", flush=True)
    return {row: taken[1:] for row, taken in times.items()}


def spread(seconds: list[float]) -> str:
    """Two cells of a table."""
    return f"{statistics.median(seconds):.2f} s | {min(seconds):.2f}-{max(seconds):.2f} s"


def main() -> None:
    """Measure, and print the table."""
    on_what = machine()
    times = measured(rows(), seconds_of, __doc__)
    torchrun = next(iter(times.values()))
    print(f"\n{on_what}\n\n| to the prompt | median | min-max | more than `torchrun` |\n|---|---|---|---|")
    for row, taken in times.items():
        more = statistics.median(mine - theirs for mine, theirs in zip(taken, torchrun, strict=True))
        print(f"| {row.label} | {spread(taken)} | {more:+.2f} s |")
    print("", *reported(figures(times)), sep="\n")


def figures(times: dict[Row, list[float]]) -> Iterator[Figure]:
    """What was to be reached, and what was: with a Deck 1.5 s more than `torchrun`, which has none."""
    (_, theirs), *others = times.items()
    for row, taken in others:
        if row.is_interrupted:
            goals = [Goal(bound=2.0, of="here", at_most=True)]
            yield Figure(what=f"to the prompt: {row.label}", here=taken, goals=goals)
        else:
            what = f"last step of 20 to the prompt, {row.label}"
            yield Figure.beside("`torchrun`", theirs, share=True, what=what, here=taken)
            more = [mine - its for mine, its in zip(taken, theirs, strict=True)]
            goals = [Goal(bound=1.5, of="here", at_most=True)]
            yield Figure(what=f"{what}, more than `torchrun`", here=more, goals=goals)


if __name__ == "__main__":
    main()
