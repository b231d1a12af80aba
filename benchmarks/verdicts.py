"""Random schedules of faults, and what a gang must do under each. Pure: `schedules.py` runs them.

A schedule is drawn from a seed and its index alone: a setting of the gang, and one to three faults. Afterwards `judge`
holds against each other what was asked for, what was done (`Made`) and what was seen (`Story`).
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from signal import Signals
from typing import Any

SAMPLES = 12
PRIME = 2_147_483_647
TAIL = 5
"""Steps from the order to finish to the last one."""
LONG_STOP = 20.0
"""Seconds; longer than every time-out that a silent process may run into, of which an agent's 15 is the longest."""
SHORT_STOP = 2.0
HANG_TIMEOUT = 8.0
MODEL_HANG_TIMEOUT = 15.0
"""The same where a model is trained: torch imports its compiler for the first optimizer, which takes seconds."""
GRACE_AFTER_DRIVER = 6.0
"""Seconds from a driver's sudden end to that of its last rank, of which four are for a busy machine."""
MAX_RECOVERY = 60.0
"""Seconds from a fault, or from the end of a suspension, to training again or to the end."""
MAX_UNACCOUNTED = 0.02
"""Share of the wall time that a gang's goodput may leave unexplained."""
MAX_MEMORY_GROWTH = 128 << 20
"""Bytes by which a driver or a worker may have grown over one gang, whose state is 8 MiB at most."""


def expected(steps: int) -> int:
    """What the training must return after so many steps, with any number of ranks."""
    value = 0
    for step in range(1, steps + 1):
        total = sum((step * 7919 + sample * 104729) % 65536 for sample in range(SAMPLES))
        value = (value * 31 + total) % PRIME
    return value


# ---- What is drawn --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The gang that is disturbed."""

    num_workers: int
    ranks_per_worker: int
    min_workers: int | None
    max_restarts: int
    hang_timeout: float | None
    save_interval: int
    ballast: int
    """MiB in each checkpoint: with more, uploads take longer."""
    heeds_sigterm: bool
    """The driver ends its gangs upon SIGTERM, as a Flyte task does."""
    is_warm: bool
    """The driver has run a gang before."""
    start_timeout: float = 90.0
    trains_model: bool = False
    """Each step also trains a model, whose weights must be those of an undisturbed training, bit for bit."""

    @property
    def world_size(self) -> int:
        """Ranks of the whole gang."""
        return self.num_workers * self.ranks_per_worker

    def __str__(self) -> str:
        parts = [f"{self.num_workers}x{self.ranks_per_worker}", f"restarts {self.max_restarts}"]
        parts += [f"min {self.min_workers}"] * (self.min_workers is not None)
        parts += ["hang"] * (self.hang_timeout is not None)
        parts += [f"save {self.save_interval}", f"{self.ballast} MiB"]
        parts += ["task"] * self.heeds_sigterm + ["warm"] * self.is_warm
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that is done to some processes at some moment."""

    target: str
    signum: Signals
    moment: str
    victim: int
    """Which of the ranks or workers, modulo their number."""
    steps: int = 0
    """Since the fault before, in the middle."""
    delay: float = 0.0
    """Seconds from the moment's sign."""
    seconds: float | None = None
    """A suspension's."""
    comes_back: float | None = None
    """Seconds from a pod's end to the start of the one that replaces it; None: never, or it is no pod."""

    @property
    def name(self) -> str:
        """What is done."""
        return f"{self.signum.name} {self.target}"

    @property
    def loses_pod(self) -> bool:
        """The worker is gone with its nanny, which would bring another."""
        return self.target in ("pod", "nanny") and self.signum != Signals.SIGSTOP

    @property
    def loses_worker(self) -> bool:
        """The worker goes, or seems to."""
        return self.loses_pod or (self.target == "worker" and self.seconds in (None, LONG_STOP))

    @property
    def ends_driver(self) -> bool:
        """The driver may not even notice."""
        return self.target == "driver" and self.signum in (Signals.SIGKILL, Signals.SIGINT)

    @property
    def is_kind(self) -> bool:
        """Ranks and fork servers take orders from their parents only: nothing may come of it.

        A rank that is interrupted by itself may take it for its user's Ctrl-C: it is no part of the foreground's group.
        """
        signals = {"rank": (Signals.SIGTERM,), "fork server": (Signals.SIGTERM, Signals.SIGINT)}
        return self.signum in signals.get(self.target, ())

    def __str__(self) -> str:
        when = {"middle": f"middle +{self.steps}"}.get(self.moment, self.moment)
        for_how_long = f" {self.seconds:g} s" if self.seconds is not None else ""
        back = ("" if self.comes_back is not None else ", for good") if self.loses_pod else ""
        return f"{self.name}{for_how_long} [{self.victim}] ({when}{back})"


@dataclass(frozen=True)
class Schedule:
    """A gang and what is done to it."""

    seed: int
    index: int
    setting: Setting
    faults: tuple[Fault, ...]


SIGNALS = {
    "rank": {"SIGKILL": 5, "SIGSEGV": 2, "SIGSTOP": 3, "SIGTERM": 2, "SIGINT": 1},
    "worker": {"SIGKILL": 6, "SIGSEGV": 1, "SIGSTOP": 3, "SIGTERM": 1},
    "pod": {"SIGKILL": 4, "SIGTERM": 2},
    "nanny": {"SIGKILL": 2, "SIGTERM": 2, "SIGSTOP": 1},
    "fork server": {"SIGKILL": 4, "SIGTERM": 2, "SIGINT": 1, "SIGSTOP": 1},
    "scheduler": {"SIGKILL": 3, "SIGTERM": 1, "SIGSTOP": 2},
    "driver": {"SIGKILL": 3, "SIGTERM": 7, "SIGINT": 2, "SIGSTOP": 2},
    "everything": {"SIGTERM": 4, "SIGINT": 1, "SIGSTOP": 2},
}
"""Target -> what is sent, with weights."""
TARGETS = {"rank": 28, "worker": 22, "pod": 9, "nanny": 6, "fork server": 11, "scheduler": 7, "driver": 9}
TARGETS["everything"] = 8
MOMENTS = ("start", "first", "middle", "checkpoint", "restart", "newcomer", "growth", "together", "end")
FIRST_MOMENTS = {"start": 20, "first": 10, "middle": 35, "checkpoint": 20, "end": 15}


GROWING_SHARE = 0.15
"""Schedules that begin with a worker that is lost, done without, and comes back."""


def _choice(rng: random.Random, weights: dict[str, int]) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]


def draw(seed: int, index: int) -> Schedule:
    """The schedule of that index; no other is needed for it."""
    rng = random.Random(f"{seed}/{index}")
    num_workers = rng.choice((2, 2, 3))
    min_workers = rng.choice((None, rng.randint(1, num_workers - 1)))
    max_restarts = rng.choices((0, 1, 3, 5), (1, 1, 4, 4))[0]
    num_faults = rng.choices((1, 2, 3), (45, 40, 15))[0]
    faults: list[Fault] = []
    if rng.random() < GROWING_SHARE:
        min_workers, max_restarts = num_workers - 1, max(max_restarts, 3)
        faults.append(_draw_loss(rng))
    while len(faults) < num_faults:
        moments = _moments_after(faults, min_workers, max_restarts)
        faults.append(_draw_fault(rng, _choice(rng, moments)))
    suspends_rank = any(fault.target == "rank" and fault.seconds == LONG_STOP for fault in faults)
    num_gone = sum(fault.loses_pod and fault.comes_back is None for fault in faults)
    setting = Setting(
        num_workers=num_workers,
        ranks_per_worker=rng.choice((1, 1, 2)),
        min_workers=min_workers,
        max_restarts=max_restarts,
        hang_timeout=HANG_TIMEOUT if suspends_rank or rng.random() < 0.3 else None,
        save_interval=rng.choice((1, 1, 3, 7)),
        ballast=8 if any(fault.moment == "checkpoint" for fault in faults) else rng.choice((0, 0, 1)),
        heeds_sigterm=rng.random() < 0.75,
        is_warm=rng.random() < 0.5,
        start_timeout=25.0 if num_gone > num_workers - (min_workers or num_workers) else 90.0,
    )
    return Schedule(seed, index, setting, tuple(faults))


CHAIN = (("rank", "SIGKILL"), ("rank", "SIGSEGV"), ("rank", "SIGSTOP"), ("worker", "SIGKILL"))


def draw_chain(seed: int, num_faults: int) -> Schedule:
    """Return a long schedule: a model is trained while such faults come one after the other, equally often.

    Each fault comes at least eight steps after the last, so that no error comes at the same step twice.
    """
    rng = random.Random(f"{seed}/chain")
    kinds = [CHAIN[number % len(CHAIN)] for number in range(num_faults)]
    rng.shuffle(kinds)
    faults = [
        Fault(
            target=target,
            signum=Signals[name],
            moment="middle",
            victim=rng.randrange(6),
            steps=rng.randint(8, 15),
            seconds=LONG_STOP if name == "SIGSTOP" else None,
        )
        for target, name in kinds
    ]
    setting = Setting(
        num_workers=2,
        ranks_per_worker=1,
        min_workers=None,
        max_restarts=10_000,
        hang_timeout=MODEL_HANG_TIMEOUT,
        save_interval=3,
        ballast=0,
        heeds_sigterm=True,
        is_warm=True,
        trains_model=True,
    )
    return Schedule(seed, 0, setting, tuple(faults))


def _moments_after(faults: list[Fault], min_workers: int | None, max_restarts: int) -> dict[str, int]:
    """When the next fault may come, after these."""
    if not faults:
        return FIRST_MOMENTS
    last = faults[-1]
    is_over = last.moment == "end" or last.target in ("scheduler", "driver", "everything") or max_restarts == 0
    if is_over or (last.loses_pod and last.signum == Signals.SIGTERM and min_workers is None):
        return {"together": 1}
    moments = {"together": 25, "middle": 20, "checkpoint": 10, "end": 10}
    if last.moment != "start" and last.signum in (Signals.SIGKILL, Signals.SIGSEGV):
        moments["restart"] = 25
        if min_workers is not None and (last.target == "worker" or last.comes_back is not None):
            moments |= {"growth": 25, "newcomer": 25}
    return moments


def _draw_loss(rng: random.Random) -> Fault:
    """A worker that is lost and comes back."""
    return Fault(
        target=rng.choice(("worker", "worker", "pod")),
        signum=Signals.SIGKILL,
        moment=rng.choice(("first", "middle", "checkpoint")),
        victim=rng.randrange(6),
        steps=rng.randint(2, 15),
        comes_back=rng.uniform(0.0, 2.0),
    )


def _draw_fault(rng: random.Random, moment: str) -> Fault:
    target = _choice(rng, TARGETS)
    if moment in ("growth", "newcomer") and rng.random() < 0.3:
        target = "driver"
    signum = Signals[_choice(rng, SIGNALS[target])]
    is_pod = target in ("pod", "nanny")
    return Fault(
        target=target,
        signum=signum,
        moment=moment,
        victim=rng.randrange(6),
        steps=rng.randint(2, 15),
        delay=rng.random()
        * {"start": 1.5, "restart": 0.3, "newcomer": 0.8, "growth": 0.3, "end": 0.3}.get(moment, 0.0),
        seconds=rng.choice((SHORT_STOP, LONG_STOP)) if signum == Signals.SIGSTOP else None,
        comes_back=rng.uniform(0.0, 2.0) if is_pod and rng.random() < 0.75 else None,
    )


# ---- What was done and seen -----------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Made:
    """A fault that was made."""

    fault: Fault
    at: float
    """Seconds since the epoch."""
    ranks: set[int] | None
    """Who may be blamed for it; None: anyone, since ranks are just being placed."""
    workers: set[str] | None
    """The same for workers."""
    is_certain: bool
    """The gang was training, and nothing else was done to it."""
    recovery: float | None = None
    """Seconds until all ranks trained again, or the gang had ended."""


@dataclass(frozen=True)
class Note:
    """What a rank wrote down."""

    rank: int
    attempt: int
    kind: str
    """`start`, `step`, `save`, `stopped`, `returning`"""
    step: int
    at: float
    pid: int


@dataclass(kw_only=True)
class Story:
    """What was seen of one gang."""

    events: list[dict[str, Any]] = field(default_factory=list)
    """What the driver's observer heard, in its order."""
    notes: list[Note] = field(default_factory=list)
    made: list[Made] = field(default_factory=list)
    outcome: str = ""
    """`finished`, `died`, or an error's type."""
    message: str = ""
    results: list[list[int]] = field(default_factory=list)
    """Steps and value of each rank."""
    undisturbed: list[list[int]] = field(default_factory=list)
    """Results of a training of as many steps without faults; of a model alone."""
    wall: float = 0.0
    """Seconds from the call to its result."""
    troubles: list[str] = field(default_factory=list)
    """What the runner has found amiss by itself: what did not come in time, what was left over."""

    def of_kind(self, *kinds: str) -> list[dict[str, Any]]:
        """Events."""
        return [event for event in self.events if event["kind"] in kinds]


# ---- What must be so ------------------------------------------------------------------------------------------------


def judge(schedule: Schedule, story: Story) -> list[str]:
    """All that was not as it should be."""
    found = list(story.troubles)
    found += _judge_outcome(schedule, story)
    found += _judge_results(schedule, story)
    found += _judge_account(schedule, story)
    found += _judge_blame(schedule, story)
    found += _judge_steps(story)
    found += _judge_stop(schedule, story)
    found += _judge_growth(story)
    found += [
        f"{made.fault}: {made.recovery:.0f} s until the gang trained again or had ended"
        for made in story.made
        if made.recovery is not None and made.recovery > MAX_RECOVERY + (made.fault.seconds or 0.0)
    ]
    return found


def _judge_outcome(schedule: Schedule, story: Story) -> Iterator[str]:
    allowed = _allowed(schedule, story)
    if not any(name == story.outcome and pattern in story.message for name, pattern in allowed):
        said = f": {story.message.splitlines()[0][:300]}" if story.message else ""
        names = sorted({f"{name} ({pattern})" if pattern else name for name, pattern in allowed})
        yield f"ended as {story.outcome}{said}; allowed: {', '.join(names)}"


def _allowed(schedule: Schedule, story: Story) -> set[tuple[str, str]]:
    """How it may end: an outcome, and what must be in the message."""
    setting, may_be_late = schedule.setting, _may_be_late(schedule)
    certain: set[tuple[str, str]] = set()
    possible: set[tuple[str, str]] = set()
    for made in story.made:
        endings, may_go_on = _endings(made.fault, setting)
        possible |= endings
        if endings and not may_go_on and not may_be_late:
            certain |= endings
    num_gone = sum(made.fault.loses_pod and made.fault.comes_back is None for made in story.made)
    if num_gone > setting.num_workers - (setting.min_workers or setting.num_workers):
        too_few = {("WorkerLostError", "are needed"), ("GangStartError", "")}
        possible |= too_few
        certain |= set() if may_be_late else possible
    budget, is_spent = _spent(setting, story)
    possible |= budget
    if certain:  # two at once: either may be first, and none goes on
        return certain | {ending for ending in possible if len(story.made) > 1}
    return budget if is_spent else possible | {("finished", "")}


def _endings(fault: Fault, setting: Setting) -> tuple[set[tuple[str, str]], bool]:
    """How a fault may end the gang by itself, and whether the gang may as well go on."""
    is_term = fault.signum == Signals.SIGTERM
    ending: set[tuple[str, str]] = set()
    goes_on = False
    match fault.target:
        case _ if fault.signum == Signals.SIGSTOP or fault.is_kind:
            goes_on = True
        case "scheduler":
            ending = {("WorkerLostError", "scheduler"), ("WorkerLostError", "worker"), ("PreemptedError", "")}
        case "driver" | "everything":
            ending = {("PreemptedError" if is_term and setting.heeds_sigterm else "died", "")}
        case _:  # told to end before there are ranks, or where fewer workers are enough, it goes on
            ending = {("PreemptedError", "")} if is_term else set()
            goes_on = True
    return ending, goes_on


def _may_be_late(schedule: Schedule) -> bool:
    """The gang may have had its results by then, also where a fault came too late to be made at all."""
    return any(fault.moment == "end" for fault in schedule.faults)


def _is_own(fault: Fault) -> bool:
    return fault.target == "rank" and (
        fault.signum in (Signals.SIGSEGV, Signals.SIGINT)
        or (fault.signum == Signals.SIGSTOP and fault.seconds == LONG_STOP)
    )


def _may_defeat(fault: Fault) -> bool:
    """An attempt may fail of it, to be charged to one of the budgets."""
    if fault.is_kind or fault.target in ("scheduler", "driver", "everything"):
        return fault.target == "scheduler" and fault.signum != Signals.SIGSTOP
    if fault.signum == Signals.SIGSTOP:
        return fault.seconds == LONG_STOP and fault.target in ("rank", "worker")
    return True


def _spent(setting: Setting, story: Story) -> tuple[set[tuple[str, str]], bool]:
    """The errors that a used-up budget allows, and whether it must be used up."""
    defeats = [made for made in story.made if _may_defeat(made.fault)]
    hangs = [made for made in defeats if made.fault.signum == Signals.SIGSTOP and setting.hang_timeout is not None]
    own = [made for made in defeats if _is_own(made.fault) or made in hangs]
    infrastructure = [made for made in defeats if not _is_own(made.fault)]
    endings: set[tuple[str, str]] = set()
    if len(infrastructure) > setting.max_restarts:
        endings |= {("WorkerLostError", ""), ("PreemptedError", "")}
    if len(own) > setting.max_restarts:
        endings |= {("GangError", "")} | ({("GangHungError", "")} if hangs else set())
    elif len(own) > 1:
        endings |= {(name, "same error came at the same step twice") for name in ("GangError", "GangHungError")}
    if any(made.fault.signum == Signals.SIGINT for made in own) and _has_kept_nothing(story):
        endings |= {("GangError", "no checkpoint had been saved since the start")}
    if setting.max_restarts == 0 and any(made.fault.moment == "start" for made in defeats):
        endings |= {("GangStartError", ""), ("GangError", "")}
    must = setting.max_restarts == 0 and any(made.is_certain and _must_defeat(made.fault) for made in defeats)
    return endings, must


def _has_kept_nothing(story: Story) -> bool:
    """In its last attempt: an exception would come again."""
    return [event["kind"] for event in story.of_kind("placed", "kept")][-1:] == ["placed"]


def _interrupts_ranks(fault: Fault) -> bool:
    """The driver, which ends of it, may hear that a rank has raised for it just before."""
    return fault.target == "everything" and fault.signum == Signals.SIGINT


def _must_defeat(fault: Fault) -> bool:
    """Made while a gang trains, and alone, it fails the attempt."""
    if not _may_defeat(fault) or fault.target == "scheduler":
        return False
    if fault.signum == Signals.SIGSTOP:
        return True
    return fault.signum in (Signals.SIGKILL, Signals.SIGSEGV)


def _judge_account(schedule: Schedule, story: Story) -> Iterator[str]:
    """The parts of the goodput add up to the wall time, in a long training."""
    for event in story.of_kind("accounted")[-1:] if schedule.setting.trains_model else ():
        parts = sum(seconds for name, seconds in event["goodput"].items() if name != "total")
        if abs(parts / story.wall - 1) > MAX_UNACCOUNTED:
            yield f"the goodput's parts are {parts:.2f} s of {story.wall:.2f} s"


def _judge_results(schedule: Schedule, story: Story) -> Iterator[str]:
    if story.outcome != "finished":
        return
    if schedule.setting.trains_model:
        if story.results != story.undisturbed:
            yield f"steps and weights are {story.results}, undisturbed {story.undisturbed}"
        return
    world_size = _placed(story)[-1][0]
    if len(story.results) != world_size:
        yield f"{len(story.results)} results, of {world_size} ranks"
    for rank, (steps, value) in enumerate(story.results):
        if value != expected(steps):
            yield f"rank {rank} returned {value} after {steps} steps instead of {expected(steps)}"
    if len({steps for steps, _ in story.results}) > 1:
        yield f"the ranks ended after different steps: {[steps for steps, _ in story.results]}"


def _placed(story: Story) -> list[tuple[int, list[str]]]:
    """Of each attempt the number of ranks, and the worker of each."""
    return [(len(event["workers"]), event["workers"]) for event in story.of_kind("placed")]


# ---- blame

DEFEAT = re.compile(r"rank (?P<rank>\d+) on (?P<worker>\S+?)(?: after step \d+)?: (?P<how>.*); starting again")
ERROR = re.compile(r"rank (?P<rank>\d+) of \d+ failed on (?P<worker>\S+) \(host \S+\)(?: after step \d+)?: (?P<how>.*)")
LOST = "worker was lost"
UNPREPARED = "before it had its orders|the agent that watches its ranks failed"
"""What may be said of a rank that is killed before it was told what to run."""


def _cause(fault: Fault, setting: Setting) -> str:
    """What must be said of a fault's consequence."""
    if _interrupts_ranks(fault):
        return "KeyboardInterrupt"
    if fault.target == "rank":
        told = {Signals.SIGSTOP: "hangs", Signals.SIGINT: "KeyboardInterrupt"}
        return told.get(fault.signum, fault.signum.name)
    if fault.target == "fork server":
        return f"{LOST}|SIGKILL"
    if fault.signum == Signals.SIGSTOP and setting.hang_timeout is not None:
        return f"{LOST}|hangs"
    return LOST


def _defeats(story: Story) -> list[tuple[float, int, str, str]]:
    """When, which rank, its worker, and how: of each attempt that failed."""
    found = []
    for event in story.of_kind("restarting", "ended"):
        text = str(event["text"])
        if event["kind"] == "restarting" or story.outcome in ("WorkerLostError", "GangError", "GangHungError"):
            pattern = DEFEAT if event["kind"] == "restarting" else ERROR
            if match := pattern.search(text):
                found.append((event["at"], int(match["rank"]), match["worker"], match["how"]))
    return found


def _judge_blame(schedule: Schedule, story: Story) -> Iterator[str]:
    unused = [made for made in story.made if _may_defeat(made.fault) or _interrupts_ranks(made.fault)]
    for at, rank, worker, how in _defeats(story):
        explaining = [m for m in unused if _explains(m, schedule.setting, at, rank, worker, how)]
        if explaining:
            unused.remove(explaining[0])
        else:
            yield f"rank {rank} on {worker} was blamed, {how!r}: no fault that was made explains it"
    missed = [
        made
        for made in unused
        if made.is_certain and _must_defeat(made.fault) and not _is_covered(made, schedule, story)
    ]
    yield from (f"{made.fault}: no rank was blamed for it" for made in missed)
    for event in story.of_kind("ended"):
        if "same error came at the same step twice" in str(event["text"]) and sum(_is_own(m.fault) for m in unused) > 1:
            yield "an error counted as the same as another, though there were none"


def _is_covered(made: Made, schedule: Schedule, story: Story) -> bool:
    """What another fault is blamed for had this one, too, for its cause.

    As where a worker is killed that was suspended; or the suspended one did not answer when the gang ended for another
    reason, and was given up with that. Or an earlier fault was just about to end the attempt, whose ranks were being
    ended when this one hit them.
    """
    later = [defeat for defeat in _defeats(story) if defeat[0] >= made.at]
    if made.fault.signum == Signals.SIGSTOP:
        return bool(later)
    earlier = [other for other in story.made if other is not made and other.at <= made.at]
    return any(_explains(made, schedule.setting, *defeat) for defeat in later) or any(
        _explains(other, schedule.setting, *defeat) for other in earlier for defeat in later[:1]
    )


def _explains(made: Made, setting: Setting, at: float, rank: int, worker: str, how: str) -> bool:
    cause = _cause(made.fault, setting)
    if made.ranks is None:
        cause = f"{cause}|{UNPREPARED}"
    named = made.ranks is None or rank in made.ranks or (made.workers is not None and worker in made.workers)
    return made.at <= at + 0.05 and named and re.search(cause, how) is not None


# ---- steps


def _judge_steps(story: Story) -> Iterator[str]:
    """Nothing is lost: each attempt starts at the newest checkpoint that was kept, and takes one step after another.

    What is kept may be newer than what the observer has heard of, never older.
    """
    starts: dict[int, int] = {0: 0}
    newest, attempt = 0, -1
    for event in story.events:
        match event["kind"]:
            case "placed":
                attempt += 1
            case "kept":
                newest = max(newest, event["step"])
            case "restarting":
                starts[attempt + 1] = event["step"] or 0
                if starts[attempt + 1] < newest:
                    yield f"attempt {attempt + 1} starts from step {starts[attempt + 1]}, {newest} was kept"
    by_rank: dict[tuple[int, int], list[Note]] = {}
    for note in story.notes:
        by_rank.setdefault((note.attempt, note.rank), []).append(note)
    for (number, rank), notes in by_rank.items():
        start = starts.get(number)
        told = [note.step for note in notes if note.kind == "start"]
        steps = [note.step for note in notes if note.kind == "step"]
        if told != [start] and not (story.outcome == "died" and start is None):
            yield f"rank {rank} of attempt {number} started from {told}, the gang from {start}"
        elif steps != list(range(told[0] + 1, told[0] + 1 + len(steps))):
            yield f"rank {rank} of attempt {number} took the steps {steps} after {told[0]}"


def _judge_stop(schedule: Schedule, story: Story) -> Iterator[str]:
    """A stop request saves the last step; made while the gang trains and alone, nothing keeps it from that."""
    asked = [made for made in story.made if made.is_certain and made.fault.signum == Signals.SIGTERM]
    asked = [made for made in asked if made.fault.target in ("driver", "everything", "nanny", "pod")]
    if not asked or (asked[0].fault.target in ("driver", "everything") and not schedule.setting.heeds_sigterm):
        return
    attempt = max((note.attempt for note in story.notes if note.at < asked[0].at), default=0)
    trained = max((note.step for note in story.notes if note.attempt == attempt and note.kind == "step"), default=0)
    kept = [event["step"] for event in story.of_kind("kept")]
    if trained not in kept:
        yield f"{asked[0].fault}: step {trained} was trained, and {max(kept, default=None)} the newest checkpoint kept"


def _judge_growth(story: Story) -> Iterator[str]:
    """Growing costs one interruption, and brings more ranks."""
    sizes = [len(event["workers"]) for event in story.of_kind("placed")]
    num_growths, attempt = 0, -1
    for event in story.events:
        if event["kind"] == "placed":
            attempt += 1
        elif event["kind"] == "restarting" and "more workers" in str(event["text"]):
            num_growths += 1
            if attempt + 1 < len(sizes) and sizes[attempt + 1] <= sizes[attempt]:
                lost = any(made.fault.loses_worker for made in story.made)
                if not lost or len(story.made) == 1:
                    yield f"it grew from {sizes[attempt]} ranks to {sizes[attempt + 1]}"
    # A fork server's end takes the agent along, whose worker is asked again.
    num_lost = sum(made.fault.loses_worker or made.fault.target == "fork server" for made in story.made)
    if num_growths > num_lost + sum(made.fault.moment in ("growth", "newcomer") for made in story.made):
        yield f"it stopped {num_growths} times in order to grow, after {num_lost} losses"
