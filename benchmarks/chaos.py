"""Train pet_names while ranks and workers are killed at random, and check that the result is the same to the last bit.

    python benchmarks/chaos.py                            # 20 faults on two workers, some five minutes
    python benchmarks/chaos.py --quick                    # 4 faults: does it still run?
    python benchmarks/chaos.py --faults 100 --seed 7 --workers 3 --data names.csv
    python benchmarks/chaos.py --schedules 200            # something else: see schedules.py

Trains `tasks.char_lstm` by `dispatch.run` on a Dask cluster twice: first undisturbed, then with faults. A fault is made
only when the gang runs: all of its ranks have taken a step since the last recovery. There are four kinds, equally
often, in an order that the seed decides, as it does the rank and the step:

    SIGKILL a rank      it is taken away
    SIGSEGV a rank      it crashes in C code
    SIGSTOP a rank      it hangs, and the hang detector has to find it (`hang_timeout`)
    SIGKILL a worker    with all its ranks; its nanny brings a new one

Then the weights must be equal (`torch.equal`), and so must the held-out losses of every epoch; and where the gang says
that its time has gone must add up to the wall time within 2 %. The exit code is 0 if all that is so and all faults were
made, else 1. How often the blame fell on the rank that was hit, with what was done to it, is counted beside.

This process imports nothing but the standard library; scheduler, workers and driver are processes of their own, and
every one is ended with it, also after Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import schedules
from figures import Figure, Goal, reported
from launch import machine
from running import ROOT, Cluster, Program, nothing_left, until, worker_of

PATIENCE = 120.0
"""Seconds for the gang to train again."""
MAX_UNACCOUNTED = 0.02
"""Of the wall time, which the gang's goodput must add up to."""
STEPS_PER_FAULT = 6
"""With fewer steps than this for each fault, some might not find a gang that runs."""

DRIVER = """
import json
import os
import sys
import time
import torch
from distributed import Client
from flytekitplugins.daskpytorch import Gang, Observer, current_rank, dispatch
from tasks import char_lstm
from tasks.char_lstm import Hyperparameters
from tasks.names import load_names, split_by_name

def train(folder, training, held_out, hp):
    from torch.optim.optimizer import register_optimizer_step_post_hook

    torch.set_num_threads(1)
    notes = open(os.path.join(folder, f"steps-{current_rank().rank}"), "a", buffering=1)

    def note(optimizer, *_):
        step = next(iter(optimizer.state.values()))["step"]  # Adam's own count, which its checkpoint restores
        notes.write(f"{os.getpid()} {int(step)} {time.time()!r}\\n")

    register_optimizer_step_post_hook(note)
    return char_lstm.train(training, held_out, hp)

class Account(Observer):
    def accounted(self, goodput):
        global account
        account = goodput.as_dict()

arguments = json.loads(sys.argv[1])
hp = Hyperparameters(**arguments["hp"])
loaded = load_names(arguments["data"])
training, held_out = (char_lstm.windows(part) for part in split_by_name(loaded.names, hp.held_out, hp.seed))
results = []
with Client(scheduler_file=arguments["cluster"]) as client:
    print("@ready", loaded.report, flush=True)
    for line in sys.stdin:
        settings = Gang(max_restarts=10_000, hang_timeout=arguments["hang_timeout"], observers=(Account,))
        began_at = time.monotonic()
        everyone = dispatch.run(client, train, line.strip(), training, held_out, hp, gang=settings).result()
        wall = time.monotonic() - began_at
        if not all(torch.equal(everyone[0].state_dict[n], o.state_dict[n]) for o in everyone for n in o.state_dict):
            raise ValueError("the ranks have ended with different weights")
        results.append(everyone[0])
        losses = [epoch.held_out_loss for epoch in results[-1].epochs]
        print("@trained", json.dumps([losses, wall, account]), flush=True)
        if len(results) == 2:
            one, other = (result.state_dict for result in results)
            differing = [name for name in one if not torch.equal(one[name], other[name])]
            print("@compared", json.dumps([len(one), differing]), flush=True)
"""

BLAMED = re.compile(
    r": rank (?P<rank>\d+) on \S+?(?: after step \d+)?: (?P<cause>.*); starting again \(failure (\d+)\)"
)
"""What the driver writes of a failed attempt."""
RESUMED = re.compile(r": going on from (?P<where>step \d+|the beginning)")
"""What it writes of the next attempt."""

# ---- Faults ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """What is done, and the words without which it is not blamed."""

    name: str
    signum: signal.Signals
    cause: str
    hits_worker: bool = False
    is_own: bool = False
    """It looks like a fault of the trained function's own."""


KINDS = (
    Kind("SIGKILL a rank", signal.SIGKILL, "SIGKILL"),
    Kind("SIGSEGV a rank", signal.SIGSEGV, "SIGSEGV", is_own=True),
    Kind("SIGSTOP a rank", signal.SIGSTOP, "hangs", is_own=True),
    Kind("SIGKILL a worker", signal.SIGKILL, "worker was lost", hits_worker=True),
)


@dataclass(frozen=True)
class Fault:
    """One fault and what came of it."""

    kind: Kind
    rank: int
    step: int
    """The newest that the rank had taken."""
    blames: list[tuple[int, str]]
    """Rank and cause, for each attempt that failed; there should be one."""
    resumed: str
    seconds: float
    """Until all ranks had taken a step again."""

    @property
    def is_blamed(self) -> bool:
        """The rank was named, with what was done to it."""
        rank, cause = self.blames[0] if self.blames else (None, "")
        return rank == self.rank and self.kind.cause in cause


@dataclass(frozen=True)
class Step:
    """The newest step of a rank."""

    pid: int
    number: int
    time: float


@dataclass
class Gang:
    """A gang that trains, as seen from outside."""

    driver: Program
    folder: Path
    num_ranks: int
    num_events: int = 0
    """Lines of the driver's log that are known."""

    def step(self, rank: int) -> Step | None:
        """The newest step of that rank."""
        path = self.folder / f"steps-{rank}"
        if not path.exists():
            return None
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 200))
            whole = [line for line in file.read().decode().splitlines(keepends=True) if line.endswith("\n")]
        if not whole:
            return None
        pid, number, at = whole[-1].split()
        return Step(int(pid), int(number), float(at))

    def steps(self) -> dict[int, Step]:
        """The newest of all ranks."""
        return {rank: step for rank in range(self.num_ranks) if (step := self.step(rank)) is not None}

    def first_at(self, rank: int, old_pids: set[int], since: float) -> float:
        """When that rank took its first step in a new process."""
        steps = (line.split() for line in (self.folder / f"steps-{rank}").read_text().splitlines())
        return next(float(at) for pid, _, at in steps if int(pid) not in old_pids and float(at) > since)

    def is_past(self, number: int, old_pids: set[int]) -> bool:
        """All ranks are in new processes, and beyond that step."""
        steps = self.steps()
        return len(steps) == self.num_ranks and all(
            step.pid not in old_pids and step.number > number for step in steps.values()
        )

    def has_ended(self) -> bool:
        """Whether there is nothing left to disturb."""
        return self.driver.has_spoken()

    def news(self) -> str:
        """What the driver has written since this was asked last."""
        lines = self.driver.log.read_text(errors="replace").splitlines()
        new, self.num_events = lines[self.num_events :], len(lines)
        return "\n".join(new)


def make(kind: Kind, rank: int, gang: Gang) -> Fault | None:
    """Make a fault, and wait until the gang trains again; None if the training was over before."""
    gang.news()
    before = gang.steps()
    pid = before[rank].pid
    victim = worker_of(pid) if kind.hits_worker else pid
    hit_at = time.time()
    os.kill(victim, kind.signum)
    old_pids = {step.pid for step in before.values()}
    until(lambda: gang.has_ended() or gang.is_past(0, old_pids), "the gang to train again", PATIENCE)
    if not gang.is_past(0, old_pids):
        return None
    news = gang.news()
    blames = [(int(found["rank"]), found["cause"]) for found in BLAMED.finditer(news)]
    resumed = [found["where"] for found in RESUMED.finditer(news)]
    seconds = max(gang.first_at(other, old_pids, hit_at) for other in range(gang.num_ranks)) - hit_at
    return Fault(kind, rank, before[rank].number, blames, resumed[-1] if resumed else "nowhere", seconds)


def disturb(gang: Gang, num_faults: int, num_steps: int, seed: int) -> list[Fault]:
    """Make all the faults, spread over the training."""
    rng = random.Random(seed)
    kinds = [KINDS[number % len(KINDS)] for number in range(num_faults)]
    rng.shuffle(kinds)
    began_at = time.time()
    faults: list[Fault] = []
    own_fault_at = -1
    for number, kind in enumerate(kinds):
        steps = gang.steps()
        step = max((step.number for step in steps.values()), default=0)
        # As many steps as there are for each fault to come and the end, or fewer.
        target = step + rng.randint(0, (num_steps - step) // (num_faults - number + 1))
        if kind.is_own:
            target = max(target, own_fault_at + 1)  # the same error at the same step twice would rightly end the gang
        until(lambda target=target: gang.has_ended() or gang.is_past(target, set()), "steps to be taken", PATIENCE)
        rank = rng.randrange(gang.num_ranks)
        fault = None if gang.has_ended() else make(kind, rank, gang)
        if fault is None:
            break
        if kind.is_own:
            own_fault_at = fault.step + 1
        faults.append(fault)
        print(f"{time.time() - began_at:6.1f} s  {len(faults):3} of {num_faults}  {line(fault)}", flush=True)
    return faults


def line(fault: Fault) -> str:
    """A fault in a line."""
    blamed = "; ".join(f"rank {rank}: {cause}" for rank, cause in fault.blames)
    mark = "right" if fault.is_blamed else "WRONG"
    return (
        f"{fault.kind.name}: rank {fault.rank} after step {fault.step}; blamed ({mark}): {blamed}; "
        f"from {fault.resumed}; {fault.seconds:.2f} s"
    )


@dataclass(frozen=True)
class Training:
    """What a training has come to."""

    losses: list[float]
    wall: float
    """Seconds from the call to its result, as the caller measures them."""
    goodput: dict[str, float]
    """Where they have gone, as the gang says."""

    @property
    def is_accounted(self) -> bool:
        """The parts add up to the whole."""
        parts = sum(seconds for name, seconds in self.goodput.items() if name != "total")
        return abs(parts / self.wall - 1) <= MAX_UNACCOUNTED


# ---- The whole ------------------------------------------------------------------------------------------------------


def train(driver: Program, folder: Path, num_ranks: int) -> Gang:
    """Start a training."""
    folder.mkdir()
    driver.tell(str(folder))
    return Gang(driver, folder, num_ranks)


def summary(faults: list[Fault], trainings: list[Training], num_weights: int, differing: list[str]) -> Iterator[str]:
    """What came of it, in lines."""
    yield f"- faults: {len(faults)}; blamed rightly: {sum(fault.is_blamed for fault in faults)}"
    for kind in KINDS:
        seconds = [fault.seconds for fault in faults if fault.kind is kind]
        if seconds:
            took = f"median {statistics.median(seconds):.2f} s, {min(seconds):.2f}–{max(seconds):.2f} s"
            yield f"- {kind.name}: {len(seconds)}; {took} to the next step of all ranks"
    if extra := sum(max(0, len(fault.blames) - 1) for fault in faults):
        yield f"- restarts that no fault accounts for: {extra}"
    undisturbed, disturbed = (training.losses for training in trainings)
    same = undisturbed == disturbed
    yield f"- held-out losses: {'equal' if same else f'DIFFERENT, {undisturbed} undisturbed and {disturbed}'}"
    weights = f"{len(differing)} of {num_weights} tensors DIFFERENT: {', '.join(differing)}" if differing else "equal"
    yield f"- weights: {weights}{'' if differing else f', all {num_weights} tensors'}"


def accounts(trainings: list[Training]) -> Iterator[str]:
    """Where the time of both has gone, in a Markdown table."""
    names = [name for name in trainings[0].goodput if name != "total"]
    yield f"| seconds | wall time | all parts | {' | '.join(names)} |"
    yield "|---" * (3 + len(names)) + "|"
    for label, training in zip(("undisturbed", "with faults"), trainings, strict=True):
        parts = [training.goodput[name] for name in names]
        whole = f"{sum(parts):.2f} ({sum(parts) / training.wall - 1:+.2%})"
        yield f"| {label} | {training.wall:.2f} | {whole} | {' | '.join(f'{part:.2f}' for part in parts)} |"


def figures(faults: list[Fault], trainings: list[Training]) -> Iterator[Figure]:
    """What was to be reached, and what was."""
    right = sum(fault.is_blamed for fault in faults)
    goals = [Goal(bound=len(faults), of="here")]
    yield Figure(what=f"random faults blamed rightly, of {len(faults)}", here=[right], unit="", goals=goals)
    yield Figure(what="random fault to the next step of all ranks", here=[fault.seconds for fault in faults])
    for label, training in zip(("undisturbed", "with faults"), trainings, strict=True):
        parts = [training.goodput[name] for name in training.goodput if name != "total"]
        missing = 100 * abs(sum(parts) / training.wall - 1)
        goals = [Goal(bound=100 * MAX_UNACCOUNTED, of="here", at_most=True)]
        what = f"where the time of a training went, {label}: beside the wall time"
        yield Figure(what=what, here=[missing], unit="%", goals=goals)


def run_schedules(seed: int, indices: list[int]) -> NoReturn:
    """Run schedules, and end with the exit code that says whether all ended as they must."""
    print(machine(), f"seed {seed}", sep="\n", flush=True)
    with nothing_left("chaos") as folder:
        is_right = schedules.run_all(seed, indices, folder)
    sys.exit(int(not is_right))


def main() -> None:
    """Train twice, compare, and say how it went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=20, metavar="N", help="how many faults to make (default: 20)")
    parser.add_argument("--quick", action="store_true", help="4 faults: does it still run?")
    parser.add_argument("--seed", type=int, help="decides which faults, where and when (default: 0; of schedules: any)")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="Dask workers, a rank each (default: 2)")
    parser.add_argument("--data", default="", metavar="URI", help="a JSON or CSV file of names (default: embedded)")
    parser.add_argument("--epochs", type=int, metavar="N", help="default: 6, and more for many faults; 2 if quick")
    parser.add_argument("--checkpoint-interval", type=int, default=5, metavar="STEPS", help="default: 5")
    parser.add_argument("--hang-timeout", type=float, default=15.0, metavar="SECONDS", help="default: 15")
    parser.add_argument("--schedules", type=int, metavar="N", help="instead: so many random schedules of faults")
    parser.add_argument("--only", type=int, nargs="+", metavar="INDEX", help="instead: these of the seed's schedules")
    arguments = parser.parse_args()
    if arguments.schedules or arguments.only:  # of the seed's schedules, so --only is nothing without it
        if arguments.only and arguments.seed is None:
            parser.error("--only needs the --seed whose schedules these are")
        seed = random.randrange(10_000) if arguments.seed is None else arguments.seed
        run_schedules(seed, arguments.only or list(range(arguments.schedules)))
    num_faults = 4 if arguments.quick else arguments.faults
    if num_faults < 1 or arguments.workers < 2:
        parser.error("--faults must be 1 or more, and --workers 2 or more")
    hp = {
        "epochs": arguments.epochs or (2 if arguments.quick else max(6, num_faults // 3)),
        "checkpoint_interval": arguments.checkpoint_interval,
        "log_interval": 1,
    }

    print(machine(), flush=True)
    with nothing_left("chaos") as folder:
        cluster = Cluster(folder / "cluster", arguments.workers)
        settings = {"cluster": cluster.contact, "hp": hp, "data": arguments.data}
        settings["hang_timeout"] = arguments.hang_timeout
        driver = Program.of(DRIVER, folder / "driver", json.dumps(settings), environment={"PYTHONPATH": str(ROOT)})
        print(driver.hear("ready"), flush=True)
        gang = train(driver, folder / "undisturbed", arguments.workers)
        trainings = [Training(*json.loads(driver.hear("trained", 3600)))]
        num_steps = gang.steps()[0].number
        print(f"undisturbed: {num_steps} steps, held-out losses {trainings[0].losses}", flush=True)
        if num_steps < STEPS_PER_FAULT * num_faults:
            raise SystemExit(f"{num_steps} steps are too few for {num_faults} faults; give more --epochs")
        gang = train(driver, folder / "disturbed", arguments.workers)
        faults = disturb(gang, num_faults, num_steps, arguments.seed or 0)
        trainings.append(Training(*json.loads(driver.hear("trained", 3600))))
        num_weights, differing = json.loads(driver.hear("compared"))
        print(*summary(faults, trainings, num_weights, differing), "", *accounts(trainings), sep="\n", flush=True)
        print(*reported(figures(faults, trainings)), sep="\n", flush=True)
    if len(faults) < num_faults:
        print(f"the training was over after {len(faults)} of {num_faults} faults; give more --epochs")
    undisturbed, disturbed = trainings
    is_same = not differing and undisturbed.losses == disturbed.losses
    is_accounted = all(training.is_accounted for training in trainings)
    sys.exit(int(not is_same or not is_accounted or len(faults) < num_faults))


if __name__ == "__main__":
    main()
