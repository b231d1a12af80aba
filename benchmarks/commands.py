"""Measure a command's time to its first all-reduce, to the first step of an edited file, and back to the prompt.

    pip install '.[flyte2]'                     # Flyte 2, for the row of `flyte run --local`
    python benchmarks/commands.py               # five rounds, about ten minutes
    python benchmarks/commands.py --quick       # one round, as a trial

Two ranks on the CPU take twenty tiny steps, under `torchrun --standalone`, by `daskpytorch run` with the same script,
and in local runs of the same function as a task. Before each run, a line of the file changes, so that no compiled or
packed file of the last run is valid. Rank 0 notes three moments of each run:

met      end of the first all-reduce: seconds since the start of the command
step     end of the first optimizer step: seconds since the start of the command
prompt   end of the command: seconds since the last step, or since Ctrl-C for `interrupted`, which gets Ctrl-C
         two seconds after the first of 100,000 steps
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from figures import Figure, at_most, report
from running import Program, asked, console_script, nothing_left, take_turns, torchrun, until

MARKS = "BENCHMARK_MARKS"
"""Environment variable with the folder of rank 0's notes, one file for each moment."""

TRAIN = f"""
import os
import time
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

EDITED = {{edited}}

def mark(name):
    if distributed.get_rank() == 0:
        with open(os.path.join(os.environ["{MARKS}"], name), "w") as file:
            file.write(repr(time.time()))

def train(num_steps, pause, log):
    distributed.all_reduce(torch.ones(1))
    mark("met")
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(num_steps):
        loss = model(torch.randn(64, 2)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss, step, num_steps)
        time.sleep(pause)
        mark("last" if step else "step")
    return loss.item()
"""

TORCHRUN = f"""{TRAIN}
distributed.init_process_group("gloo")
train(20, 0.0, lambda *_: None)
distributed.destroy_process_group()
"""

TASKS = f"""{TRAIN}
from {{plugins}}.daskpytorch import DaskDDP, WorkerGroup, current_rank

DASK = DaskDDP(workers=WorkerGroup(number_of_workers=2))

def log(loss, step, num_steps):
    current_rank().log({{{{"loss": loss.item()}}}}, step=step, num_steps=num_steps)
"""

PYFLYTE = f"""{TASKS}
from flytekit import task

@task(task_config=DASK)
def dask(num_steps: int = 20, pause: float = 0.0) -> float: return train(num_steps, pause, log)

@task(task_config=DASK, enable_deck=True)
def dask_deck(num_steps: int = 20, pause: float = 0.0) -> float: return train(num_steps, pause, log)
"""

FLYTE = f"""{TASKS}
import flyte

env = flyte.TaskEnvironment("training", plugin_config=DASK)

@env.task
def dask(num_steps: int = 20, pause: float = 0.0) -> float: return train(num_steps, pause, log)
"""

ENDLESS = ("--num_steps", "100000", "--pause", "0.05")
WAYS = ("torchrun", "command", "dask", "dask_deck", "flyte run", "interrupted")
LABELS = {
    "command": "`daskpytorch run`, the same script",
    "dask": "`pyflyte run`, `DaskDDP`",
    "dask_deck": "`pyflyte run`, `DaskDDP`, with a Deck",
    "flyte run": "`flyte run --local`, `DaskDDP`",
}
ROWS = {
    "met": ("cold command to first all-reduce, two ranks", ("command", "dask", "flyte run"), 1.15),
    "step": ("Enter to the first step of a file just changed, two ranks", ("dask",), 1.15),
    "prompt": ("last step of 20 to the prompt", ("command", "dask", "dask_deck"), 1.0),
}
"""Row, contestants and goal of each moment. The goal is the largest ratio to `torchrun`'s seconds."""
Seconds = dict[str, float]


def command_of(way: str, folder: Path) -> list[str]:
    """Write a contestant's program, and return its command."""
    text = {"torchrun": TORCHRUN, "command": TORCHRUN, "flyte run": FLYTE}.get(way, PYFLYTE)
    plugins = "flyteplugins" if way == "flyte run" else "flytekitplugins"
    (folder / "program.py").write_text(text.format(edited=time.time_ns(), plugins=plugins))
    if way == "torchrun":
        return [*torchrun(2), "program.py"]
    if way == "command":
        return [sys.executable, "-m", "flytekitplugins.daskpytorch", "run", "--nproc=2", "program.py"]
    if way == "flyte run":
        return [console_script("flyte"), "run", "--local", "program.py", "dask"]
    task, options = ("dask_deck", ENDLESS) if way == "interrupted" else (way, ())
    return [console_script("pyflyte"), "run", "program.py", task, *options]


def run(way: str, folder: Path) -> Seconds:
    """Run a command, and return the seconds to each moment."""
    for name in ("met", "step", "last"):
        (folder / name).unlink(missing_ok=True)
    command, began = command_of(way, folder), time.time()
    program = Program(command, folder, {MARKS: str(folder)})
    interrupted_at = 0.0
    if way == "interrupted":
        until(lambda: (folder / "last").exists() or program.has_ended(), "the first steps")
        time.sleep(2.0)
        interrupted_at = time.time()
        os.kill(program.pid, signal.SIGINT)
    code = program.wait()
    ended = time.time()
    if (code != 0) != bool(interrupted_at) or not (folder / "last").exists():
        raise program.failure(f"ended with {code}")
    at = {name: float((folder / name).read_text()) for name in ("met", "step", "last")}
    return {"met": at["met"] - began, "step": at["step"] - began, "prompt": ended - (interrupted_at or at["last"])}


def figures(found: dict[str, list[Seconds]]) -> Iterator[Figure]:
    """Yield the rows, all beside `torchrun` except that of Ctrl-C."""
    for moment, (what, ways, bound) in ROWS.items():
        for way in ways:
            if {way, "torchrun"} <= found.keys():
                theirs, here = ([each[moment] for each in found[name]] for name in ("torchrun", way))
                row = {"what": f"{what}, {LABELS[way]}", "here": here, "goals": at_most(bound)}
                yield Figure.beside("`torchrun`", theirs, share=True, **row)
    if interrupted := [each["prompt"] for each in found.get("interrupted", [])]:
        yield Figure(what="Ctrl-C to the prompt, `DaskDDP`, with a Deck", here=interrupted, goals=at_most(2.0, "here"))


def main() -> None:
    """Measure, and print the table."""
    arguments = asked(__doc__, WAYS, rounds=(5, 1, "rounds that count"))
    with nothing_left("commands") as folder:
        found = take_turns({way: lambda it=way: run(it, folder) for way in arguments.ways}, arguments.rounds)
    report(figures(found), arguments.on)


if __name__ == "__main__":
    main()
