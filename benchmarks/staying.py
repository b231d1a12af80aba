"""Random schedules of calls in gangs that stay. `chaos.py --staying 20` is the command.

A schedule has up to three calls that leave the gang alive, and then one fault that ends the gang or its driver:

    returns, raises              all ranks return, or one rank raises: the gang goes on
    leaves                       one rank raises while the others wait for that rank in a collective
    SIGINT                       Ctrl-C in a call
    rank, worker, driver         SIGKILL, in a call or between two calls

Each rank keeps a total, to which each call adds its number over all ranks. Each call must return the exact totals, or
raise the right error with the right rank. After the gang's end, a call must be refused with words on how to begin anew,
and a new gang on the same cluster must work. Nothing may be left over.
"""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from running import Program, is_running, kill, until, worker_below, worker_of
from schedules import Stage, Watched, census_of, check_what_is_left, settled
from verdicts import GRACE_AFTER_DRIVER, Story

HARMLESS = ("returns", "raises")
FATAL = ("leaves", "SIGINT", "rank in", "rank between", "worker in", "worker between", "driver in", "driver between")
WORLD_SIZE = 4

DRIVER = """
import gc, json, os, signal, sys, threading, time
from distributed import Client
from flytekitplugins.daskpytorch import Gang, GangError, current_rank, dispatch

class SpoiltError(Exception):
    pass

def load():
    return {"total": 0}

def step(state, folder, number, what, victim):
    import torch
    from torch import distributed

    rank = current_rank()
    open(f"{folder}/in-{number}-{rank.rank}", "w").close()
    is_waiting = what not in ("returns", "raises")
    if what in ("raises", "leaves") and rank.rank == victim:
        raise SpoiltError(f"call {number} of rank {victim} is spoilt")
    while is_waiting:
        distributed.all_reduce(torch.ones(1))
        time.sleep(0.005)
    if what == "returns":
        numbers = torch.tensor([number])
        distributed.all_reduce(numbers)
        state["total"] += int(numbers)
    return state["total"]

def say(word, what=None):
    print(f"@{word}", json.dumps(what), flush=True)

def tried(call):
    try:
        return ["returned", call(), None, None]
    except BaseException as error:
        cause = error if isinstance(error, GangError) else error.__cause__
        return [type(error).__name__, str(error), getattr(cause, "rank", None), str(cause)]

def main(contact):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what a shell starts in the background
    client = Client(scheduler_file=contact)
    say("ready")
    gang = state = None
    for line in sys.stdin:
        match line.split():
            case ["begin"]:
                gang = dispatch.gang(client, gang=Gang(ranks_per_worker=2, workers=2, start_timeout=60))
                state = gang.keep(load)
                say("begun", gang.call(os.getpid).result())
            case ["call", number, what, victim]:
                what_happens = (os.getcwd(), int(number), what, int(victim))
                say("ended", tried(lambda: gang.call(step, state, *what_happens).result()))
            case ["close"]:
                gang.close()
                gang = state = None
                say("closed")
            case ["census"]:
                gc.collect()
                say("census", [thread.name for thread in threading.enumerate()])
            case _:
                break
    client.close(timeout=3)

if __name__ == "__main__":
    main(sys.argv[1])
"""


@dataclass(frozen=True)
class Schedule:
    """Calls of a gang: what happens in each, and in or to which rank."""

    seed: int
    index: int
    calls: tuple[tuple[str, int], ...]

    keeps_cluster = True

    @property
    def again(self) -> str:
        """Options of `chaos.py` that repeat the schedule."""
        return f"--staying {self.index + 1} --seed {self.seed}"

    def __str__(self) -> str:
        return ", ".join(f"{what} [{rank}]" for what, rank in self.calls)


def draw(seed: int, index: int) -> Schedule:
    """Return the schedule with this index. Each kind of fatal fault comes equally often."""
    rng = random.Random(f"{seed}/staying/{index}")
    kinds = [rng.choice(HARMLESS) for _ in range(rng.randint(0, 3))] + [FATAL[(seed + index) % len(FATAL)]]
    return Schedule(seed, index, tuple((kind, rng.randrange(WORLD_SIZE)) for kind in kinds))


class Run:
    """One schedule with its driver on a cluster. The story gets the deviations from the required behaviour."""

    def __init__(self, stage: Stage, folder: Path, story: Story) -> None:
        self.cluster = stage.prepare(2, folder)
        self.folder = folder / "driver"
        self.driver = Program.serving(DRIVER, self.folder, self.cluster.contact)
        self.watched, self.story = Watched(self.driver, self.cluster, self.folder, story), story
        self.total = self.number = 0
        self.pids: list[int] = []

    def make(self, schedule: Schedule) -> None:
        """Make the calls with their faults, and then a new gang, if the driver lives."""
        before = {pid: census_of(pid) for pid in (self.driver.pid, *map(worker_below, self.cluster.nannies))}
        self.begin()
        for what, rank in schedule.calls:
            self.story.troubles += self.happens(what, rank)
        if self.story.outcome != "died":
            self.story.troubles += self.refused()
            self.begin()
            self.story.troubles += self.happens("returns", 0)
            self.driver.tell("close")
            self.driver.hear("closed")
            self.story.outcome = "finished"
        check_what_is_left(self.watched, False, before)

    def begin(self) -> None:
        """Begin a gang, in which nothing is kept yet."""
        self.cluster.wait_for(2)
        self.driver.tell("begin")
        self.pids, self.total = json.loads(self.driver.hear("begun")), 0

    def happens(self, what: str, rank: int) -> Iterator[str]:
        """Make one call, with its fault, and yield the deviations."""
        target, _, moment = what.partition(" ")
        if moment == "between":
            self.kill(target, rank)
        self.number += 1
        if target != "driver" or moment != "between":
            self.driver.tell(f"call {self.number} {target} {rank}")
        if moment == "in" or what == "SIGINT":
            marks = [self.folder / f"in-{self.number}-{each}" for each in range(WORLD_SIZE)]
            until(lambda: all(mark.exists() for mark in marks), "all ranks to be in the call")
            self.kill(target, rank)
        if target == "driver":
            self.story.outcome = "died"
            if not settled(lambda: not any(map(is_running, self.pids)), GRACE_AFTER_DRIVER):
                yield f"{what}: ranks still run after {GRACE_AFTER_DRIVER:g} s"
            return
        name, value, blamed, text = json.loads(self.driver.hear("ended"))
        yield from self.deviations(what, rank, name, value, blamed, str(text))

    def deviations(
        self, what: str, rank: int, name: str, value: object, blamed: int | None, text: str
    ) -> Iterator[str]:
        """Yield an error if a call has ended otherwise than it must."""
        target = what.partition(" ")[0]
        self.total += WORLD_SIZE * self.number * (what == "returns")
        if what == "returns":
            is_right = (name, value) == ("returned", [self.total] * WORLD_SIZE)
        elif what == "SIGINT":
            is_right = name == "KeyboardInterrupt"
        elif what in ("raises", "leaves"):
            is_right = name == "SpoiltError" and blamed == rank and f"call {self.number} of rank {rank}" in str(value)
        else:
            lost = range(rank // 2 * 2, rank // 2 * 2 + 2) if target == "worker" else [rank]
            said = "its worker was lost" if target == "worker" else "SIGKILL"
            is_right = name in ("WorkerLostError", "GangError") and said in text and blamed in (*lost, None)
        if not is_right:
            yield f"{what} [{rank}], total {self.total}: {name}, rank {blamed}: {value}, {text[:500]}"

    def refused(self) -> Iterator[str]:
        """Make a call after the gang's end, and yield an error if the call is not refused rightly."""
        self.driver.tell("call 0 returns 0")
        name, value, *_ = json.loads(self.driver.hear("ended"))
        if (
            name != "GangError"
            or "this gang has ended" not in value
            or "Begin a new gang by dispatch.gang" not in value
        ):
            yield f"a call after the gang's end: {name}: {value}"

    def kill(self, target: str, rank: int) -> None:
        """Kill a rank, its worker or the driver, or interrupt the driver. Wait for the successor of a killed worker."""
        known = set(self.cluster.workers())
        pid = self.pids[rank] if target in ("rank", "worker") else self.driver.pid
        kill(worker_of(pid) if target == "worker" else pid, signal.SIGINT if target == "SIGINT" else signal.SIGKILL)
        if target == "worker":
            until(lambda: set(self.cluster.workers()) - known, "another worker")


def play(schedule: Schedule, stage: Stage, folder: Path) -> Story:
    """Run one schedule, and return its story with all deviations."""
    story = Story()
    try:
        Run(stage, folder, story).make(schedule)
    except SystemExit as error:  # the harness exits upon errors: the deviations before it are kept
        story.troubles.append(f"it ended early: {error}")
    return story
