"""What it costs an undisturbed training to be supervised, logged, checkpointed and watched, per step.

    python benchmarks/overhead.py                         # two starts of seventeen rounds, nine minutes
    python benchmarks/overhead.py --quick                 # one start of three rounds: does it still run?

Two ranks train the model of `tasks.char_lstm` on the embedded names, in blocks of 46 steps, which is one epoch of that
training; with GPUs a rank on each, with nccl, in blocks of 460 steps. All the contestants are up at the same time and
wait, but for the one whose turn it is; every round each has one block, in an order drawn anew, with the very same
batches. So a round is a few seconds long, and a busy minute of the machine bears on all alike. Ratios and differences
are taken within a round.

torchrun  a plain script under `torchrun`
bare      a gang with `hang_timeout=None`, whose function calls nothing of ours
watched   a gang as it is out of the box (`hang_timeout="auto"`), in a block in which its function calls nothing of ours
metric    the same gang, in a block with `log` at every step
full      the same gang, in a block with `should_stop` and `log` at every step, and one checkpoint of model and
          optimizer in the middle, so that it is written and sent to the driver before the block is over

A step's cost is looked at in three ways. By the clock: where the ranks fill all cores, as here, what anybody else does
is taken from them; but on a shared machine steps differ by more than is to be found. By the processor time of all that
take part: ranks, driver, workers with the agents in them, Dask's scheduler and nannies; the training's own differs from
block to block as the clock does. And by that of whatever is not the training's own, which hardly differs: calls of ours
in all ranks, threads of ours there, and the other processes. That is all there is but for what the training loses by
caches that others have used, which only the first two show. Of each difference the median over the rounds is printed,
and between which bounds it lies with 95 %, by resampling the rounds: only where both bounds are on one side of a goal
it is known to be reached, or missed.

What it costs to count where the time goes is too little for any of that: it is the processor time that a loop over a
loader and an optimizer, in which nothing else happens, takes more than without, in turn, after each block of `full`.

`metric` and `full` beside `watched` show a small effect best: the processes are the same. The others differ from start
to start, as any two processes do (where their memory lies, which core they prefer), and so all is started twice.
What agents, driver and Dask do in the background goes on in the turns of all; their processor time is counted apart.

This process imports nothing but the standard library; what is measured runs in processes of its own.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

from figures import Figure, Goal, reported
from launch import JOIN, gpus, machine
from running import FOLLOW, Cluster, Gang, nothing_left

BACKEND, NUM_RANKS, NUM_WORKERS = ("nccl", len(gpus()), 1) if gpus() else ("gloo", 2, 2)
EPOCH = 46
BLOCK = EPOCH if BACKEND == "gloo" else 10 * EPOCH
"""Steps in one turn."""
CALLS = ("should_stop", "log", "save")
USES = {"metric": ("log",), "full": CALLS}
"""What is called in a block; in those of the others nothing."""

TRAIN = f"""{FOLLOW}
import itertools
import contextlib
import os
import statistics
import sys
import threading
import time
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader, dataloader
from tasks.char_lstm import BLANK, CharLSTM, windows
from tasks.names import load_names

@contextlib.contextmanager
def uncounted():
    iterator, hooks = dataloader._BaseDataLoaderIter, optimizers._global_optimizer_post_hooks
    wait, every = iterator.__next__, dict(hooks)
    [counting] = [number for number, hook in every.items() if hook.__module__.endswith("rank.usage")]
    del hooks[counting]
    iterator.__next__ = wait.__wrapped__
    try:
        yield
    finally:
        iterator.__next__ = wait
        hooks.update(every)

def idle(num_steps):
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    optimizer = torch.optim.SGD([weight])
    used = time.thread_time()
    for _ in DataLoader(range(num_steps), batch_size=None):
        optimizer.step()
    return (time.thread_time() - used) / num_steps

def counting():
    with_it = idle(1000)
    with uncounted():
        return with_it - idle(1000)

def trainings_own():
    ours = {{thread.native_id for thread in threading.enumerate() if thread.name.startswith("daskpytorch")}}
    seconds = 0.0
    for thread in os.listdir("/proc/self/task"):
        if int(thread) not in ours:
            with contextlib.suppress(OSError), open(f"/proc/self/task/{{thread}}/schedstat") as file:
                seconds += int(file.read().split()[0]) / 1e9
    return seconds

def of_all_ranks(seconds, device):
    together = torch.tensor(seconds, dtype=torch.float64, device=device)
    distributed.all_reduce(together)
    return together.tolist()

def train(folder, device, tools):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = CharLSTM().to(device)
    gang_model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters())
    every = windows(load_names().names).long()
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(distributed.get_rank()))
    batches = every[order].to(device).split(128)[:{EPOCH}] * {BLOCK // EPOCH}
    step = 0

    def take_turn(mode):
        nonlocal step
        uses = {USES!r}.get(mode, ())
        spent = dict.fromkeys({CALLS!r}, 0.0)

        def timed(name, call, *args):
            used = time.thread_time()
            call(*args)
            spent[name] += time.thread_time() - used

        wait_for_all(device)
        used, own = time.process_time(), trainings_own()
        times = [time.perf_counter()]
        for number, batch in enumerate(batches):
            logits = gang_model(batch[:, :-1])
            loss = functional.cross_entropy(logits.transpose(1, 2), batch[:, 1:], ignore_index=BLANK)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if "log" in uses:
                timed("log", tools.log, {{"loss": loss.detach(), "epoch": 1}}, step)
            if "save" in uses and number == {BLOCK // 2}:
                state = {{"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}}
                timed("save", tools.checkpoint.save, state, step)
            if "should_stop" in uses:
                timed("should_stop", tools.should_stop)
            times.append(time.perf_counter())
        wait_for_all(device)
        mean = (time.perf_counter() - times[0]) / len(batches)
        median = statistics.median(after - before for before, after in itertools.pairwise(times))
        used, own = time.process_time() - used, trainings_own() - own
        called = sum(spent.values())
        own, called, beside = of_all_ranks([own - called, called, used - own], device)
        return mean, median, spent, [own, called, beside], counting() if mode == "full" else 0.0

    follow(folder, take_turn)
"""

TORCHRUN = f"""{TRAIN}{JOIN}
[folder] = json.loads(sys.argv[1])
train(folder, join("{BACKEND}", int(os.environ["LOCAL_RANK"])), None)
"""

DASK = f"""{TRAIN}
from distributed import Client
from flytekitplugins.daskpytorch import Gang, current_rank, dispatch

def rank(folder):
    train(folder, current_rank().device, current_rank())

folder, cluster, hang_timeout = json.loads(sys.argv[1])
shape = {{"backend": "{BACKEND}", "ranks_per_worker": {NUM_RANKS // NUM_WORKERS}}}
with Client(scheduler_file=cluster) as client:
    dispatch.run(client, rank, folder, gang=Gang(max_restarts=0, hang_timeout=hang_timeout, **shape)).result()
"""


@dataclass(frozen=True)
class Block:
    """One turn, as rank 0 reports it."""

    mean: float
    """Seconds per step, all that happens in the block included."""
    median: float
    """Seconds of a typical step: one without a checkpoint, and not disturbed by other processes. On a GPU
    it is the host's part."""
    spent: dict[str, float]
    """Processor seconds of rank 0 in each kind of call, altogether."""
    used: dict[str, float]
    """Processor seconds of the training itself, in all ranks, and of others meanwhile."""
    counting: float
    """Processor seconds that a step takes more since it is counted; of a block of `full`."""

    @property
    def busy(self) -> float:
        """Processor seconds of all that take part, per step."""
        return sum(self.used.values()) / BLOCK

    @property
    def aside(self) -> float:
        """The same without the training's own."""
        return self.busy - self.used[TRAINING] / BLOCK


TRAINING = "the training itself, in all ranks"
IN_RANKS = (TRAINING, "the calls, in all ranks", "threads of ours, in all ranks")
ARMS = ("torchrun", "bare", "watched", "metric", "full")
LABELS = {
    "torchrun": "torchrun: a plain script under `torchrun`",
    "bare": "bare: a gang, `hang_timeout=None`, no calls",
    "watched": 'watched: a gang, `hang_timeout="auto"`, no calls',
    "metric": "metric: the same, with `log` at every step",
    "full": "**full: the same, with `log`, `should_stop`, checkpoint**",
}
PAIRS = (
    ("metric", "watched"),
    ("full", "watched"),
    ("watched", "bare"),
    ("bare", "torchrun"),
    ("full", "torchrun"),
)
ASIDE = attrgetter("aside")
QUANTITIES: dict[str, Callable[[Block], float]] = {
    "mean step": attrgetter("mean"),
    "median step": attrgetter("median"),
    "processor time of all": attrgetter("busy"),
    "of all but the training itself": ASIDE,
}
DECISIVE: dict[str, Callable[[Block], float]] = {
    "of a step, by the clock": attrgetter("mean"),
    "of all processor time": attrgetter("busy"),
    "of all processor time, what is not the training's own": ASIDE,
}
MOST = 1.0
"""Percent of a step that all of it may cost."""
NUM_RESAMPLED = 2000
"""How often the rounds are drawn anew, for the bounds of a median."""
Round = dict[str, Block]


@dataclass
class Measured:
    """All the rounds of all the starts."""

    rounds: list[Round] = field(default_factory=list)
    background: list[float] = field(default_factory=list)
    """The processor time of driver and workers per second, of each start."""


def measure(num_starts: int, num_rounds: int, folder: Path) -> Measured:
    """Start everything, let it train in turn, and start again."""
    measured = Measured()
    rng = random.Random(0)
    for number in range(1, num_starts + 1):
        (here := folder / str(number)).mkdir()
        cluster = Cluster(here / "cluster", NUM_WORKERS)
        gangs = {
            "torchrun": Gang.of_torchrun(NUM_RANKS, here / "torchrun", TORCHRUN),
            "bare": Gang.of_driver(NUM_RANKS, here / "bare", DASK, cluster.contact, None),
            "watched": Gang.of_driver(NUM_RANKS, here / "watched", DASK, cluster.contact, "auto"),
        }
        gangs["metric"] = gangs["full"] = gangs["watched"]
        for arm in ARMS:  # not counted: whatever is done at a first step
            gangs[arm].take_turn(arm)
        around = {
            "the driver": [gangs["watched"].program.pid],
            "the workers": [cluster.worker_pid(nanny) for nanny in cluster.nannies],
            "Dask's scheduler and nannies": [cluster.scheduler, *cluster.nannies],
        }
        watchers = around["the driver"] + around["the workers"]
        began_at, used = time.monotonic(), sum(map(cpu_seconds, watchers))
        for done in range(1, num_rounds + 1):
            measured.rounds.append({arm: turn(gangs[arm], arm, around) for arm in rng.sample(ARMS, len(ARMS))})
            times = ", ".join(f"{arm} {measured.rounds[-1][arm].mean * 1e3:.2f}" for arm in ARMS)
            print(f"start {number} of {num_starts}, round {done} of {num_rounds}: {times} ms per step", file=sys.stderr)
        measured.background.append((sum(map(cpu_seconds, watchers)) - used) / (time.monotonic() - began_at))
        for program in {id(gang): gang.program for gang in gangs.values()}.values():
            program.kill()
        cluster.close()
    return measured


def turn(gang: Gang, arm: str, around: dict[str, list[int]]) -> Block:
    """One block of this contestant, and what all the others used meanwhile."""
    before = {name: sum(map(cpu_seconds, pids)) for name, pids in around.items()}
    mean, median, spent, ranks, counting = gang.take_turn(arm)
    used = {name: sum(map(cpu_seconds, pids)) - before[name] for name, pids in around.items()}
    return Block(mean, median, spent, dict(zip(IN_RANKS, ranks, strict=True)) | used, counting)


def cpu_seconds(pid: int) -> float:
    """The processor time that a process has used, to the nanosecond: see clock_getcpuclockid(3)."""
    return time.clock_gettime((~pid << 3) | 2)


# ---- Reporting ------------------------------------------------------------------------------------------------------


def table(measured: Measured) -> Iterator[str]:
    """The lines of two Markdown tables."""
    yield f"| {BACKEND}, ranks: {NUM_RANKS}, blocks of {BLOCK} steps | {' | '.join(QUANTITIES)} |"
    yield f"|---|{'---|' * len(QUANTITIES)}"
    for arm in ARMS:
        medians = [statistics.median(of(turns[arm]) for turns in measured.rounds) for of in QUANTITIES.values()]
        yield f"| {LABELS[arm]} | {' | '.join(f'{median * 1e3:.2f} ms' for median in medians)} |"
    yield ""
    yield f"| more per step, median over {len(measured.rounds)} rounds (its bounds) | {' | '.join(QUANTITIES)} |"
    yield f"|---|{'---|' * len(QUANTITIES)}"
    for arm, other in PAIRS:
        cells = [compared(measured, arm, other, of) for of in QUANTITIES.values()]
        yield f"| {arm} beside {other} | {' | '.join(cells)} |"


def compared(measured: Measured, arm: str, other: str, of: Callable[[Block], float]) -> str:
    """How much more the one takes than the other, in microseconds, and in percent of all that the other takes."""
    difference = statistics.median(of(turns[arm]) - of(turns[other]) for turns in measured.rounds)
    low, share, high = bounds(shares(measured, arm, of, other))
    return f"{difference * 1e6:+,.0f} µs, {share:+.2f} % ({low:+.2f} … {high:+.2f})"


def shares(measured: Measured, arm: str, of: Callable[[Block], float], other: str = "watched") -> list[float]:
    """How much more the one takes than the other, round by round, in percent of the whole."""
    rounds = measured.rounds
    wholes = [turns[other].busy if of is ASIDE else of(turns[other]) for turns in rounds]
    return [100 * (of(turns[arm]) - of(turns[other])) / whole for turns, whole in zip(rounds, wholes, strict=True)]


def bounds(values: list[float]) -> list[float]:
    """The median, between the bounds within which it lies with 95 %."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(NUM_RESAMPLED))
    return [medians[NUM_RESAMPLED // 40], statistics.median(values), medians[-NUM_RESAMPLED // 40]]


def known(share: list[float], most: float) -> str:
    """Whether these bounds of a median are on one side of a goal."""
    low, _, high = share
    return "reached" if high <= most else "missed" if low > most else "not known: the rounds differ by more"


def calls(measured: Measured) -> Iterator[str]:
    """What the ranks spend inside the calls, and what goes on beside them."""
    step = statistics.median(turns["watched"].median for turns in measured.rounds)
    total = 0.0
    for name, num_calls in zip(CALLS, (BLOCK, BLOCK, 1), strict=True):
        seconds = statistics.median(turns["full"].spent[name] for turns in measured.rounds)
        total += seconds / BLOCK
        each = f"{seconds / num_calls * 1e6:,.1f} µs a call"
        yield f"- processor time of a rank in `{name}`: {each}, {seconds / BLOCK * 1e6:.1f} µs per step"
    yield f"- together: {total * 1e6:.0f} µs per step, {total / step:.2%}"
    for arm in ("metric", "full"):
        for name in measured.rounds[0][arm].used:
            more = [1e6 * (turns[arm].used[name] - turns["watched"].used[name]) / BLOCK for turns in measured.rounds]
            low, middle, high = bounds(more)
            text = f"{middle:+,.0f} µs per step ({low:+,.0f} … {high:+,.0f})"
            yield f"- processor time of {name}, in `{arm}` beside `watched`: {text}"
    busy = statistics.median(measured.background)
    yield f"- in the background, driver and Dask workers use {busy * 1e3:.0f} ms of processor time per second"
    for arm in ("metric", "full"):
        for name, of in DECISIVE.items():
            verdict = known(bounds(shares(measured, arm, of)), MOST)
            yield f"- `{arm}` beside `watched`, at most {MOST:g} % {name}: {verdict}"


def figures(measured: Measured) -> Iterator[Figure]:
    """What was to be reached, and what was; of what scatters by more than it is the bounds of its median."""
    at_most = [Goal(bound=MOST, of="here", at_most=True)]
    for arm, what in (
        ("metric", "a metric at every step"),
        ("full", "a metric and `should_stop` at every step, a checkpoint a block"),
    ):
        for name, of in DECISIVE.items():
            here = bounds(shares(measured, arm, of))
            yield Figure(what=f"{what}: {name} (95 %)", here=here, unit="%", goals=at_most)
    steps = [turns["full"] for turns in measured.rounds]
    called = [100 * sum(each.spent.values()) / BLOCK / each.median for each in steps]
    what = "a metric, `should_stop`, a checkpoint: of a step, by the processor time of a rank in these calls"
    yield Figure(what=what, here=called, unit="%", goals=at_most)
    logging = [1e6 * each.spent["log"] / BLOCK for each in steps]
    yield Figure(what="`log`, a call: processor time of a rank", here=logging, unit="µs")
    counting = [100 * each.counting / each.median for each in steps]
    what = "counting where the time goes: of a step, by processor time"
    yield Figure(what=what, here=counting, unit="%", goals=at_most)
    theirs, here = ([1e3 * turns[arm].mean for turns in measured.rounds] for arm in ("torchrun", "full"))
    what = "a step of a gang with all that"
    yield Figure.beside("`torchrun`", theirs, what=what, here=here, unit="ms", goals=[Goal(bound=0.99)])


def main() -> None:
    """Measure, then print the machine, the table and the goals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=2, metavar="N", help="how often all is started (default: 2)")
    parser.add_argument("--rounds", type=int, default=17, metavar="N", help="rounds in each start (default: 17)")
    parser.add_argument("--quick", action="store_true", help="one start of three rounds: does it still run?")
    arguments = parser.parse_args()
    num_starts, num_rounds = (1, 3) if arguments.quick else (arguments.starts, arguments.rounds)
    if num_starts < 1 or num_rounds < 2:
        parser.error("--starts must be 1 or more, and --rounds 2 or more")

    on_what = machine()
    with nothing_left("overhead") as folder:
        measured = measure(num_starts, num_rounds, folder)
    print(on_what, "", *table(measured), "", *calls(measured), "", *reported(figures(measured)), sep="\n")


if __name__ == "__main__":
    main()
