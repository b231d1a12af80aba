"""Random schedules of faults, and the required behaviour of a gang under each. `schedules.py` runs the schedules.

A seed and an index decide a schedule: a setting of the gang, and one to three faults. Afterwards `judge` compares the
schedule, the faults that were made (`Made`) and the observations (`Story`).
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
"""Number of steps from the order to finish to the last step."""
SILENCE = 17.0
"""Seconds after which a suspended worker is sure to count as lost: 15, and time for the looks at it."""
LONG_STOP = 20.0
"""Duration of a long suspension, in seconds. All timeouts for a silent process are shorter, at most an agent's 15."""
SHORT_STOP = 2.0
HANG_TIMEOUT = 8.0
GRACE_AFTER_DRIVER = 6.0
"""Longest time between a driver's sudden end and its last rank's, in seconds. Busy machines need four seconds."""
MAX_RECOVERY = 60.0
"""Longest time from a fault, or the end of a suspension, to new training steps or the gang's end, in seconds."""
MAX_MEMORY_GROWTH = 128 << 20
"""Maximum number of bytes by which a driver or a worker may grow over one gang, whose state has at most 8 MiB."""


def expected(steps: int) -> int:
    """Return the training's result after this number of steps, which is the same for any number of ranks."""
    value = 0
    for step in range(1, steps + 1):
        total = sum((step * 7919 + sample * 104729) % 65536 for sample in range(SAMPLES))
        value = (value * 31 + total) % PRIME
    return value


# ---- What is drawn --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Setting of the disturbed gang."""

    num_workers: int
    ranks_per_worker: int
    min_workers: int | None
    max_restarts: int
    hang_timeout: float | None
    save_interval: int
    ballast: int
    """Padding of each checkpoint in MiB. More padding makes uploads slower."""
    heeds_sigterm: bool
    """True if the driver ends its gangs upon SIGTERM, as a Flyte task does."""
    is_warm: bool
    """True if the driver has run a gang before."""
    start_timeout: float = 90.0

    @property
    def world_size(self) -> int:
        """Number of ranks of the whole gang."""
        return self.num_workers * self.ranks_per_worker


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Signal to processes at a moment of the gang's life."""

    target: str
    signum: Signals
    moment: str
    victim: int
    """Index of the rank or worker, modulo their number."""
    steps: int = 0
    """Steps since the fault before, for the moment `middle`."""
    delay: float = 0.0
    """Seconds between the moment's sign and the fault."""
    seconds: float | None = None
    """Duration of a suspension, in seconds. None: no suspension."""
    comes_back: float | None = None
    """Seconds from a pod's end to the start of its replacement. None: never, or the target is not a pod."""

    @property
    def name(self) -> str:
        """Signal and target, for people."""
        return f"{self.signum.name} {self.target}"

    @property
    def loses_pod(self) -> bool:
        """True if the worker ends together with its nanny, which would otherwise start a new worker."""
        return self.target in ("pod", "nanny") and self.signum != Signals.SIGSTOP

    @property
    def loses_worker(self) -> bool:
        """True if the worker ends or seems to end."""
        return self.loses_pod or (self.target == "worker" and self.seconds in (None, LONG_STOP))

    @property
    def is_kind(self) -> bool:
        """True if the signal must have no effect. Ranks and fork servers take orders only from their parents.

        A rank that alone gets SIGINT may treat it as Ctrl-C, as it is not in the foreground's process group.
        """
        signals = {"rank": (Signals.SIGTERM,), "fork server": (Signals.SIGTERM, Signals.SIGINT)}
        return self.signum in signals.get(self.target, ())

    def __str__(self) -> str:
        when = {"middle": f"middle +{self.steps}"}.get(self.moment, self.moment)
        for_how_long = f" {self.seconds:g} s" if self.seconds is not None else ""
        back = ("" if self.comes_back is not None else ", for good") if self.loses_pod else ""
        return f"{self.name}{for_how_long} [{self.victim}] ({when}{back})"


@dataclass(frozen=True)
class Outage:
    """Time without storage."""

    begin: float
    """Seconds after the gang has first formed."""
    seconds: float

    def __str__(self) -> str:
        return f"no storage {self.seconds:g} s (+{self.begin:.1f} s)"


@dataclass(frozen=True)
class Schedule:
    """Setting of a gang, and its faults."""

    seed: int
    index: int
    setting: Setting
    faults: tuple[Fault, ...]
    outages: tuple[Outage, ...] | None = None
    """Times without storage. None: the gang has no storage."""

    @property
    def again(self) -> str:
        """Options of `chaos.py` that repeat the schedule."""
        return f"--seed {self.seed} --only {self.index}{' --storage 1' if self.outages is not None else ''}"

    @property
    def keeps_cluster(self) -> bool:
        """True if no fault changes the cluster."""
        return all(fault.target in ("rank", "driver") for fault in self.faults)

    def __str__(self) -> str:
        faults = [*self.faults, *(self.outages or ())]
        return f"{self.setting}  |  {'; '.join(map(str, faults))}"


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
"""Weights of the signals, by target."""
TARGETS = {"rank": 28, "worker": 22, "pod": 9, "nanny": 6, "fork server": 11, "scheduler": 7, "driver": 9}
TARGETS["everything"] = 8
MOMENTS = ("start", "first", "middle", "checkpoint", "restart", "newcomer", "growth", "together", "end")
FIRST_MOMENTS = {"start": 20, "first": 10, "middle": 35, "checkpoint": 20, "end": 15}


GROWING_SHARE = 0.15
"""Share of schedules that begin with the loss of a worker that comes back after the gang went on without it."""


def _choice(rng: random.Random, weights: dict[str, int]) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]


def draw(seed: int, index: int, *, storage: bool = False) -> Schedule:
    """Return the schedule with this index, which depends on no other schedule, nor its faults on `storage`."""
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
    # On a busy machine, the import of torch's checkpoints takes eight seconds in six ranks at once.
    hang_timeout = 2 * HANG_TIMEOUT if storage else HANG_TIMEOUT
    setting = Setting(
        num_workers=num_workers,
        ranks_per_worker=rng.choice((1, 1, 2)),
        min_workers=min_workers,
        max_restarts=max_restarts,
        hang_timeout=hang_timeout if suspends_rank or rng.random() < 0.3 else None,
        save_interval=rng.choice((1, 1, 3, 7)),
        ballast=8 if any(fault.moment == "checkpoint" for fault in faults) else rng.choice((0, 0, 1)),
        heeds_sigterm=rng.random() < 0.75,
        is_warm=rng.random() < 0.5,
        start_timeout=25.0 if num_gone > num_workers - (min_workers or num_workers) else 90.0,
    )
    return Schedule(seed, index, setting, tuple(faults), _draw_outages(seed, index) if storage else None)


def _draw_outages(seed: int, index: int) -> tuple[Outage, ...]:
    rng, end, outages = random.Random(f"{seed}/{index}/storage"), 0.0, []
    for _ in range(rng.randint(1, 3)):
        outages.append(Outage(end + rng.uniform(0.0, 2.0), rng.choice((0.05, 0.5, 2.0, 6.0))))
        end = outages[-1].begin + outages[-1].seconds
    return tuple(outages)


def _moments_after(faults: list[Fault], min_workers: int | None, max_restarts: int) -> dict[str, int]:
    """Return the weights of the next fault's moments, after these faults."""
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
    """Return the loss of a worker that comes back."""
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
    """Fault that was made."""

    fault: Fault
    at: float
    """Time of the fault, in seconds since the epoch."""
    ranks: set[int] | None
    """Ranks that may be blamed for the fault. None: any rank, as ranks are just being placed."""
    workers: set[str] | None
    """Workers that may be blamed for the fault. None: any worker."""
    is_certain: bool
    """True if the gang was training, and no other fault was made at that time."""
    recovery: float | None = None
    """Seconds until all ranks trained again, or the gang ended. None: not measured."""


@dataclass(frozen=True)
class Note:
    """Line in a rank's notes."""

    rank: int
    attempt: int
    kind: str
    """Kind of the note: `start`, `step`, `save`, `stopped` or `returning`."""
    step: int
    at: float
    pid: int


@dataclass(kw_only=True)
class Story:
    """Observations of one gang."""

    events: list[dict[str, Any]] = field(default_factory=list)
    """Events of the driver's observer, in order."""
    notes: list[Note] = field(default_factory=list)
    made: list[Made] = field(default_factory=list)
    outcome: str = ""
    """Outcome of the gang: `finished`, `died`, or an error's type."""
    message: str = ""
    results: list[list[int]] = field(default_factory=list)
    """Number of steps and value of each rank."""
    storage_back_at: float = 0.0
    """Time of the end of the last time without storage."""
    troubles: list[str] = field(default_factory=list)
    """Problems that the runner found by itself: late events and leftovers."""

    def of_kind(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the events of these kinds."""
        return [event for event in self.events if event["kind"] in kinds]


# ---- What must be so ------------------------------------------------------------------------------------------------


def judge(schedule: Schedule, story: Story) -> list[str]:
    """Return all deviations from the required behaviour."""
    found = list(story.troubles)
    found += _judge_outcome(schedule, story)
    found += _judge_results(story)
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
    """Return the allowed endings: an outcome, and a pattern for its message."""
    setting, may_be_late = schedule.setting, _may_be_late(schedule)
    certain: set[tuple[str, str]] = set()
    possible: set[tuple[str, str]] = set()
    for made in story.made:
        possible |= _endings(made.fault, setting)[0]
        if must_end(made.fault, setting) and not may_be_late:
            certain |= _endings(made.fault, setting)[0]
    budget, is_spent = _spent(setting, story)
    possible |= budget
    num_gone = sum(made.fault.loses_pod and made.fault.comes_back is None for made in story.made)
    if num_gone > setting.num_workers - (setting.min_workers or setting.num_workers):
        too_few = {("WorkerLostError", "are needed"), ("GangStartError", "")}
        possible |= too_few
        certain |= set() if may_be_late else possible
    if certain:  # of two faults at once, either may end the gang
        return certain | {ending for ending in possible if len(story.made) > 1}
    return budget if is_spent else possible | {("finished", "")}


def must_end(fault: Fault, setting: Setting) -> bool:
    """Return True if a gang that trains cannot go on after this fault."""
    endings, goes_on = _endings(fault, setting)
    return bool(endings) and not goes_on


def _endings(fault: Fault, setting: Setting) -> tuple[set[tuple[str, str]], bool]:
    """Return the endings that a fault may cause, and whether the gang may go on as well."""
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
        case _:  # goes on if it has no ranks yet, or fewer workers are enough
            ending = {("PreemptedError", "")} if is_term else set()
            goes_on = True
    return ending, goes_on


def _may_be_late(schedule: Schedule) -> bool:
    """True if the gang may have had its results before a fault, even before one that came too late."""
    return any(fault.moment == "end" for fault in schedule.faults)


def _is_own(fault: Fault) -> bool:
    return fault.target == "rank" and (
        fault.signum in (Signals.SIGSEGV, Signals.SIGINT)
        or (fault.signum == Signals.SIGSTOP and fault.seconds == LONG_STOP)
    )


def _may_defeat(fault: Fault) -> bool:
    """True if an attempt may fail from the fault, which then counts against one of the limits on restarts."""
    if fault.is_kind or fault.target in ("scheduler", "driver", "everything"):
        return fault.target == "scheduler" and fault.signum != Signals.SIGSTOP
    if fault.signum == Signals.SIGSTOP:
        return fault.seconds == LONG_STOP and fault.target in ("rank", "worker")
    return True


def _spent(setting: Setting, story: Story) -> tuple[set[tuple[str, str]], bool]:
    """Return the errors that a used-up limit on restarts allows, and whether the limit must be used up."""
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
    """True if the last attempt kept no checkpoint, so that an exception would come again."""
    return [event["kind"] for event in story.of_kind("placed", "kept")][-1:] == ["placed"]


def _interrupts_ranks(fault: Fault) -> bool:
    """True if the fault interrupts ranks and driver together. The driver may then report a rank's exception first."""
    return fault.target == "everything" and fault.signum == Signals.SIGINT


def _must_defeat(fault: Fault) -> bool:
    """True if the fault must fail the attempt of a gang that trains undisturbed otherwise."""
    if not _may_defeat(fault) or fault.target == "scheduler":
        return False
    if fault.signum == Signals.SIGSTOP:
        return True
    return fault.signum in (Signals.SIGKILL, Signals.SIGSEGV)


def _judge_results(story: Story) -> Iterator[str]:
    if story.outcome != "finished":
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
    """Return the number of ranks and the worker of each rank, for each attempt."""
    return [(len(event["workers"]), event["workers"]) for event in story.of_kind("placed")]


# ---- blame

ON = r"on (?:\S+ \()?(?P<worker>[^\s()]+?)\)?(?: after step \d+)?: (?P<how>.*)"
DEFEAT = re.compile(rf"rank (?P<rank>\d+) {ON}; starting again")
ERROR = re.compile(rf"rank (?P<rank>\d+) of \d+ failed {ON}")
LOST = "worker was lost"
UNPREPARED = "before it had its orders|the agent that watches its ranks failed"
"""Pattern of the cause for a rank that is killed before it has its orders."""


def _cause(fault: Fault, setting: Setting) -> str:
    """Return the pattern that the report of a fault must have."""
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
    """Return the time, rank, worker and cause of each failed attempt."""
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
    """True if the failure that another fault explains also covers this fault.

    A suspended worker may be killed, or may not answer when the gang ends for another reason. It goes on early if all
    processes are suspended and continued meanwhile, and a gang may end before it counts as silent. An earlier fault may
    also be ending the attempt's ranks when this fault hits them.
    """
    later = [defeat for defeat in _defeats(story) if defeat[0] >= made.at]
    if made.fault.signum == Signals.SIGSTOP:
        is_continued = any(
            other.fault.target == "everything" and other.fault.seconds is not None and other.at > made.at
            for other in story.made
        )
        ends = [event["at"] for event in story.of_kind("ended")]
        return bool(later) or is_continued or any(end < made.at + SILENCE for end in ends)
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
    """Yield an error if an attempt does not start from the newest kept checkpoint, or skips a step.

    Storage may have a newer checkpoint than the observer has heard of, but never an older one.
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
    """Yield an error if a stop request to an otherwise undisturbed gang did not save the last step."""
    asked = [made for made in story.made if made.is_certain and made.fault.signum == Signals.SIGTERM]
    asked = [made for made in asked if made.fault.target in ("driver", "everything", "nanny", "pod")]
    if not asked or (asked[0].fault.target in ("driver", "everything") and not schedule.setting.heeds_sigterm):
        return
    if any(made.fault.signum == Signals.SIGSTOP and made.at <= asked[0].at for made in story.made):
        return  # a suspended worker's ranks do not hear that the others hold
    attempt = max((note.attempt for note in story.notes if note.at < asked[0].at), default=0)
    trained = max((note.step for note in story.notes if note.attempt == attempt and note.kind == "step"), default=0)
    kept = [event["step"] for event in story.of_kind("kept")]
    if trained not in kept:
        yield f"{asked[0].fault}: step {trained} was trained, and {max(kept, default=None)} the newest checkpoint kept"


def _judge_growth(story: Story) -> Iterator[str]:
    """Yield an error if a growth brought no more ranks, or interrupted the gang more often than workers were lost."""
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
    # A fork server's end also ends the agent, and the driver asks its worker for a new one.
    num_lost = sum(made.fault.loses_worker or made.fault.target == "fork server" for made in story.made)
    if num_growths > num_lost + sum(made.fault.moment in ("growth", "newcomer") for made in story.made):
        yield f"it stopped {num_growths} times in order to grow, after {num_lost} losses"
