"""Where the time of a cold start and of a training step on the CPU goes, before and after what was gained most.

    python benchmarks/profiles.py                         # five rounds of each, some five minutes
    python benchmarks/profiles.py --quick                 # one round: does it still run?

launch     the stages of a cold `pyflyte run`, and of `flyte run --local` where Flyte 2 is installed, of two ranks up
           to their first all-reduce. Ahead: the fork server, which imports torch for the ranks, starts before the
           tasks' file is imported. Late: the same command under another name, with which nothing is started ahead, so
           that the ranks' import waits for that file. They take turns.
step       one optimizer step of the pet-names model on all cores, per 128 windows. Recipe: `nn.LSTM` over one-hot
           floats. Prefixes: `tasks.char_lstm.CharLSTM`, which goes through the distinct prefixes of the batch, with
           128 windows and with 512. The operators are those of `torch.profiler` by their own time; it slows all of
           them down, so their times add up to more than the step takes without it.

This process imports nothing but the standard library; what is measured runs in processes of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from launch import console_script, machine
from running import ROOT, TIME_LIMIT, Program, nothing_left

MARKS = "PROFILE_MARKS"
STAGES = {
    "file": "Python, Flyte's SDK and its command line",
    "imported": "the workflow's file, and torch with it",
    "rank": "cluster, agents, ranks and rendezvous",
    "met": "the first all-reduce",
}
"""What is over when a mark is made."""

NOTES = f"""
import os
import time

def note(mark):
    with open(os.environ["{MARKS}"], "a") as marks:
        marks.write(f"{{mark}} {{time.time()!r}}\\n")

note("file")
import torch
from torch import distributed

def meet():
    note("rank")
    total = torch.ones(1)
    distributed.all_reduce(total)
    assert total.item() == 2
    note("met")
"""

PYFLYTE = f"""{NOTES}
from flytekit import task
from flytekitplugins.daskpytorch import DaskDDP, WorkerGroup

@task(task_config=DaskDDP(workers=WorkerGroup(number_of_workers=2)))
def launch() -> None:
    meet()

note("imported")
"""

FLYTE = f"""{NOTES}
import flyte
from flyteplugins.daskpytorch import DaskDDP, WorkerGroup

env = flyte.TaskEnvironment("launching", plugin_config=DaskDDP(workers=WorkerGroup(number_of_workers=2)))

@env.task
def launch() -> None:
    meet()

note("imported")
"""

STEP = """
import json
import statistics
import sys
import time
import torch
from torch import nn
from torch.nn import functional
from torch.profiler import profile
from tasks.char_lstm import BLANK, NUM_SYMBOLS, CharLSTM, windows
from tasks.names import load_names

class Recipe(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(NUM_SYMBOLS, 128, num_layers=4, dropout=0.1, batch_first=True)
        self.dense = nn.Linear(128, NUM_SYMBOLS)

    def forward(self, characters):
        return self.dense(self.lstm(functional.one_hot(characters, NUM_SYMBOLS).float())[0])

def stepper(model, batch, fused):
    optimizer = torch.optim.Adam(model.parameters(), fused=fused)
    every = windows(load_names().names).long()
    batches = every[torch.randperm(len(every), generator=torch.Generator().manual_seed(0))].split(batch)
    turns = 0

    def step():
        nonlocal turns
        turns += 1
        taken = batches[turns % (len(batches) - 1)]
        logits = model(taken[:, :-1])
        loss = functional.cross_entropy(logits.transpose(1, 2), taken[:, 1:], ignore_index=BLANK)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return step

def operators(step, share):
    with profile() as found:
        for _ in range(5):
            step()
    rows = sorted(found.key_averages(), key=lambda row: -row.self_cpu_time_total)
    return {row.key: [row.self_cpu_time_total / 5000 / share, row.count / 5 / share] for row in rows}

steps = {
    "recipe": (stepper(Recipe(), 128, False), 1),
    "prefixes": (stepper(CharLSTM(), 128, True), 1),
    "prefixes of 512": (stepper(CharLSTM(), 512, True), 4),
}
times = {name: [] for name in steps}
for number in range(3 + 10 * int(sys.argv[1])):
    for name, (step, share) in steps.items():
        began = time.perf_counter()
        step()
        if number >= 3:
            times[name].append(1000 * (time.perf_counter() - began) / share)
print("@done", json.dumps({name: [times[name], operators(*steps[name])] for name in steps}), flush=True)
"""


def stages_of(command: list[str], folder: Path) -> dict[str, float]:
    """Run a workflow from the start, and see how long each stage took, in seconds."""
    marks = folder / "marks"
    marks.unlink(missing_ok=True)
    environment = os.environ | {MARKS: str(marks)}
    began = before = time.time()
    with (folder / "log").open("wb") as log:
        subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=log, check=True, timeout=TIME_LIMIT)
    at: dict[str, float] = {}
    for line in marks.read_text().splitlines():
        mark, moment = line.split()
        # The slowest rank's; of the imports the driver's, which are the first.
        at[mark] = float(moment) if mark in ("rank", "met") else at.get(mark, float(moment))
    taken = {}
    for mark in STAGES:
        taken[mark], before = at[mark] - before, at[mark]
    return taken | {"all": before - began}


def launch_rows(folder: Path, rounds: int, command: str, text: str) -> list[str]:
    """A row for each stage, ahead and late, of `pyflyte run` or of `flyte run --local`."""
    folder.mkdir()
    (folder / "workflow.py").write_text(text)
    name, *options = command.split()
    late = folder / "late"
    late.symlink_to(console_script(name))
    programs = {"ahead": console_script(name), "late": str(late)}
    taken: dict[str, list[dict[str, float]]] = {when: [] for when in programs}
    for number in range(rounds + 1):
        for when, program in programs.items():
            stages = stages_of([sys.executable, program, *options, "workflow.py", "launch"], folder)
            print(f"round {number}: `{command}`, {when}: {stages['all']:.2f} s", file=sys.stderr)
            if number:  # the first warms the caches of files
                taken[when].append(stages)
    rows = [f"| a cold `{command}`, 2 ranks | late | ahead |", "| --- | --- | --- |"]
    for stage, what in (STAGES | {"all": "all"}).items():
        cells = [f"{statistics.median(run[stage] for run in taken[when]):.2f} s" for when in ("late", "ahead")]
        rows.append(f"| {what} | {' | '.join(cells)} |")
    shares = [ahead["all"] / late["all"] for ahead, late in zip(taken["ahead"], taken["late"], strict=True)]
    rows.append(f"| within a round | 1 | {statistics.median(shares):.2f} ({min(shares):.2f}-{max(shares):.2f}) |")
    return rows


def step_rows(folder: Path, rounds: int) -> list[str]:
    """A row for each kind of step, with the operators that take most of it."""
    program = Program.of(STEP, folder, str(rounds), environment={"PYTHONPATH": str(ROOT)})
    rows = ["| a step, per 128 windows | median | operators | which take most (own time, calls) |", "| --- " * 4 + "|"]
    for name, (times, operators) in json.loads(program.hear("done")).items():
        most = ", ".join(f"`{key}` {own:.1f} ms ({count:.0f})" for key, (own, count) in list(operators.items())[:6])
        count = sum(count for key, (_, count) in operators.items() if key.startswith("aten::"))
        spread = f"{statistics.median(times):.1f} ms ({min(times):.1f}-{max(times):.1f})"
        rows.append(f"| {name} | {spread} | {count:.0f} | {most} |")
    return rows


def main() -> None:
    """Measure, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (default: 5)")
    parser.add_argument("--quick", action="store_true", help="one round")
    asked = parser.parse_args()
    if asked.quick:
        asked.rounds = 1
    with nothing_left("profiles") as folder:
        rows = [*launch_rows(folder / "pyflyte", asked.rounds, "pyflyte run", PYFLYTE), ""]
        if find_spec("flyte") is not None:
            rows += [*launch_rows(folder / "flyte", asked.rounds, "flyte run --local", FLYTE), ""]
        rows += step_rows(folder / "step", asked.rounds)
    print("\n".join([machine(), "", *rows]))


if __name__ == "__main__":
    main()
