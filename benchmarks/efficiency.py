"""How well training scales from one rank to many: the same plain script under `torchrun` and as a gang.

    python benchmarks/efficiency.py                       # ten starts of two rounds; a quarter of an hour, two cores
    python benchmarks/efficiency.py --ranks 4 16          # these beside one rank, not 1, 2, 4, ... up to GPUs or cores
    python benchmarks/efficiency.py --quick               # one start of two rounds: does it still run?

Ranks train the model of `tasks.char_lstm` in DistributedDataParallel; here it is written with `nn.LSTM` on every
device, so that a step costs in proportion to its batch. For each number of ranks there is a `torchrun` and a gang: a
driver of its own, `dispatch.run`, and all ranks on one Dask worker, as on one node. All of them are up at the same time
and wait, but for the one whose turn it is: every round each has one block of steps of each kind, in an order drawn
anew, with the very same batches. Ratios are taken within a round; their medians and quartiles are printed.

strong    the ranks together have as large a batch as one rank alone
weak      each rank has as large a batch as one rank alone
apart     as weak, without the all-reduce: what cores and memory allow, if the ranks have nothing to say to each other
loss      `tasks.char_lstm.train` itself, by the seconds of training until the held-out loss is a bigram model's. The
          global batch is the same for each number of ranks, and there is no dropout, so all of them take the same steps
          and come to the same losses. Gangs report and save checkpoints meanwhile, `torchrun` does neither

Efficiency is a number of ranks' throughput, divided by that number and by the throughput of one rank under the same
launcher. With GPUs each rank has one, and the backend is nccl; else each rank has one thread, also where there is one
rank, since other cores would help it alone, and the backend is gloo. `CUDA_VISIBLE_DEVICES=` hides the GPUs.
Processes differ from start to start by more than from round to round, so everything is started many times, for few
rounds each.

This process imports nothing but the standard library; what is measured runs in processes of its own.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

from figures import Figure, Goal, reported
from launch import JOIN, gpus, machine, verdict
from running import FOLLOW, Cluster, Gang, nothing_left

SIDES = ("torchrun", "gang")
SCALINGS = ("strong", "weak", "apart")
LOSS_BATCH = 256
"""Of all ranks together, where the time to a loss is taken."""
NUM_EPOCHS = 2
"""Of a training to the loss."""

TRAIN = f"""{FOLLOW}
import contextlib
import sys
import time
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from tasks import char_lstm
from tasks.names import ALPHABET, load_names, split_by_name

class PlainLSTM(char_lstm.CharLSTM):
    def forward(self, characters):
        return self.dense(self.lstm(functional.one_hot(characters, len(ALPHABET)).float())[0])

def train(folder, device):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DistributedDataParallel(PlainLSTM().to(device))
    optimizer = torch.optim.Adam(model.parameters())
    training, held_out = map(char_lstm.windows, split_by_name(load_names().names, 0.1, 0))
    every = training.long().to(device)

    def samples_per_second(batch_size, num_steps, seed, is_apart):
        rng = torch.Generator().manual_seed(seed + distributed.get_rank())
        batches = every[torch.randint(len(every), (num_steps, batch_size), generator=rng).to(device)]
        wait_for_all(device)
        began = time.perf_counter()
        with model.no_sync() if is_apart else contextlib.nullcontext():
            for batch in batches:
                logits = model(batch[:, :-1])
                loss = functional.cross_entropy(logits.transpose(1, 2), batch[:, 1:], ignore_index=char_lstm.BLANK)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        wait_for_all(device)
        return num_steps * batch_size * distributed.get_world_size() / (time.perf_counter() - began)

    def losses(batch_size, epochs):
        settings = {{"batch_size": batch_size, "learning_rate": 0.006, "dropout": 0.0}}
        result = char_lstm.train(training, held_out, char_lstm.Hyperparameters(epochs=epochs, **settings))
        target = char_lstm.bigram_loss(training, held_out)
        return target, [(epoch.held_out_loss, epoch.epoch_seconds) for epoch in result.epochs]

    turns = {{"throughput": samples_per_second, "loss": losses}}
    follow(folder, lambda kind, *arguments: turns[kind](*arguments))
"""

TORCHRUN = f"""{TRAIN}{JOIN}
from flytekitplugins.daskpytorch import context

folder, backend = json.loads(sys.argv[1])
own_device = join(backend, int(os.environ["LOCAL_RANK"]))

class Rank(context.RankContext):  # tells `tasks.char_lstm.train` who it is, and reports to nobody
    device = own_device

context.enter(Rank(rank=distributed.get_rank(), world_size=distributed.get_world_size()))
train(folder, own_device)
"""

DASK = f"""{TRAIN}
from distributed import Client
from flytekitplugins.daskpytorch import Gang, current_rank, dispatch

def rank(folder):
    train(folder, current_rank().device)

folder, backend, num_ranks, cluster = json.loads(sys.argv[1])
with Client(scheduler_file=cluster) as client:
    gang = Gang(backend=backend, ranks_per_worker=num_ranks, max_restarts=0)
    dispatch.run(client, rank, folder, gang=gang).result()
"""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured."""

    ranks: list[int]
    """Numbers of ranks, from 1 up."""
    backend: str
    batch: int
    """Samples per step: of all ranks together where scaling is strong, else of each."""
    num_steps: int
    """Of one turn."""
    num_starts: int
    """How often everything is started, and each trained to the loss."""
    num_rounds: int
    """Turns of each in each start."""

    @property
    def cells(self) -> list[tuple[str, int]]:
        """Scaling and number of ranks; with one rank weak and strong are the same."""
        return [(scaling, n) for scaling in SCALINGS for n in self.ranks if n > 1 or scaling == "weak"]

    def share(self, scaling: str, num_ranks: int) -> int:
        """Samples per step and rank."""
        return self.batch // num_ranks if scaling == "strong" else self.batch


@dataclass(frozen=True, kw_only=True)
class ToLoss:
    """One training until it has a loss."""

    target: float
    """In nats per character."""
    losses: list[float]
    """After each epoch, on names that are held out."""
    seconds: list[float]
    """Of training, to the end of each epoch."""

    @property
    def num_epochs(self) -> int | None:
        """Until the loss is reached; None if it never is."""
        return next((number for number, loss in enumerate(self.losses, 1) if loss <= self.target), None)

    @property
    def time(self) -> float:
        """Seconds of training to the loss; to the end, if it is not reached."""
        return self.seconds[(self.num_epochs or len(self.seconds)) - 1]


@dataclass
class Measured:
    """All that was measured; every list has an entry for each round, or for each start, in their order."""

    throughput: dict[tuple[str, int, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    """Scaling, number of ranks and side -> samples per second."""
    to_loss: dict[tuple[int, str], list[ToLoss]] = field(default_factory=lambda: defaultdict(list))
    """Number of ranks and side -> trainings."""

    def beside(self, scaling: str, num_ranks: int) -> list[float]:
        """How many times as fast as `torchrun` the gang is, round by round."""
        gang, torchrun = (self.throughput[scaling, num_ranks, side] for side in ("gang", "torchrun"))
        return [ours / theirs for ours, theirs in zip(gang, torchrun, strict=True)]

    def efficiency(self, scaling: str, num_ranks: int, side: str) -> float:
        """What part of so many times one rank's throughput is reached."""
        many, one = self.throughput[scaling, num_ranks, side], self.throughput["weak", 1, side]
        return statistics.median(n / (num_ranks * single) for n, single in zip(many, one, strict=True))


# ---- Measuring ------------------------------------------------------------------------------------------------------


def measure(plan: Plan, folder: Path) -> Measured:
    """Start everything, let it train in turn, and start again."""
    measured = Measured()
    rng = random.Random(0)
    for number in range(1, plan.num_starts + 1):
        here = folder / str(number)
        cluster = Cluster(here / "cluster", 1)
        gangs = {(n, side): started(n, side, plan, here, cluster) for n in plan.ranks for side in SIDES}
        turns = [(scaling, n, side) for scaling, n in plan.cells for side in SIDES]
        for scaling, n, side in turns:  # not counted: whatever is done at a first step
            gangs[n, side].take_turn("throughput", plan.share(scaling, n), 2, 0, scaling == "apart")
        for done in range(1, plan.num_rounds + 1):
            for scaling, n, side in rng.sample(turns, len(turns)):
                order = plan.share(scaling, n), plan.num_steps, 1000 * done, scaling == "apart"
                measured.throughput[scaling, n, side].append(gangs[n, side].take_turn("throughput", *order))
            shown = ", ".join(f"{scaling} {n}: {measured.beside(scaling, n)[-1]:.3f}" for scaling, n in plan.cells)
            print(f"start {number}, round {done} of {plan.num_rounds}: beside torchrun: {shown}", file=sys.stderr)
        for n, side in rng.sample(list(gangs), len(gangs)):
            target, epochs = gangs[n, side].take_turn("loss", LOSS_BATCH // n, NUM_EPOCHS)
            losses, seconds = zip(*epochs, strict=True)
            found = ToLoss(target=target, losses=list(losses), seconds=list(accumulate(seconds)))
            measured.to_loss[n, side].append(found)
            print(f"start {number}: {side}, ranks: {n}: {found}", file=sys.stderr)
        for gang in gangs.values():
            gang.program.kill()
        cluster.close()
    return measured


def started(num_ranks: int, side: str, plan: Plan, folder: Path, cluster: Cluster) -> Gang:
    """Ranks of one side that wait for their turns."""
    at = folder / f"{side}-{num_ranks}"
    if side == "torchrun":
        return Gang.of_torchrun(num_ranks, at, TORCHRUN, plan.backend)
    return Gang.of_driver(num_ranks, at, DASK, plan.backend, num_ranks, cluster.contact)


# ---- Reporting ------------------------------------------------------------------------------------------------------


def throughput_table(plan: Plan, measured: Measured) -> Iterator[str]:
    """The lines of a Markdown table."""
    yield (
        f"| scaling, {plan.backend} | ranks | batch of each | samples per second: `torchrun` | **gang** "
        "| gang beside `torchrun`, median (quartiles) | efficiency: `torchrun` | **gang** |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for scaling, n in plan.cells:
        speeds = [f"{statistics.median(measured.throughput[scaling, n, side]):,.0f}" for side in SIDES]
        low, middle, high = statistics.quantiles(measured.beside(scaling, n), n=4, method="inclusive")
        shares = [f"{measured.efficiency(scaling, n, side):.0%}" for side in SIDES]
        cells = [scaling, str(n), str(plan.share(scaling, n)), *speeds, f"{middle:.3f}× ({low:.3f}–{high:.3f})"]
        yield f"| {' | '.join([*cells, *shares])} |"


def loss_table(plan: Plan, measured: Measured) -> Iterator[str]:
    """The lines of a Markdown table."""
    target = measured.to_loss[1, "gang"][0].target
    yield (
        f"| to a held-out loss of {target:.4f}, {plan.backend} | epochs | loss then | `torchrun` | **gang** "
        "| gang, times as fast as `torchrun` | gang, times as fast as one rank |"
    )
    yield "|---|---|---|---|---|---|---|"
    for n in plan.ranks:
        gang, torchrun, one = (measured.to_loss[key] for key in ((n, "gang"), (n, "torchrun"), (1, "gang")))
        seconds = [spread([found.time for found in side], " s") for side in (torchrun, gang)]
        faster = [spread(ratios(others, gang), "×") for others in (torchrun, one)]
        epochs = gang[0].num_epochs or "not reached"
        loss = gang[0].losses[(gang[0].num_epochs or 0) - 1]
        yield f"| ranks: {n} x batch {LOSS_BATCH // n} | {epochs} | {loss:.4f} | {' | '.join([*seconds, *faster])} |"


def ratios(slow: list[ToLoss], fast: list[ToLoss]) -> list[float]:
    """How many times as long the one side takes, start by start."""
    return [s.time / f.time for s, f in zip(slow, fast, strict=True)]


def spread(values: list[float], unit: str) -> str:
    """Median, least and greatest."""
    return f"{statistics.median(values):.2f}{unit} ({min(values):.2f}–{max(values):.2f})"


def figures(plan: Plan, measured: Measured) -> Iterator[Figure]:
    """What was to be reached, and what was."""
    for scaling, n in plan.cells:
        here, theirs = (measured.throughput[scaling, n, side] for side in ("gang", "torchrun"))
        what = f"training by DDP ({plan.backend}), ranks: {n}, {scaling}"
        goals = [Goal(bound=1.0)] if scaling != "apart" else []
        yield Figure.beside("`torchrun`", theirs, what=what, here=here, unit="samples/s", goals=goals)


def is_equal(measured: Measured) -> str:
    """Whether all have learnt the same."""
    reached = {found.num_epochs for trainings in measured.to_loss.values() for found in trainings}
    return (
        f"- the loss after the same number of epochs everywhere: {verdict(len(reached) == 1 and None not in reached)}"
    )


# ---- The command ----------------------------------------------------------------------------------------------------


def chosen(arguments: argparse.Namespace) -> Plan:
    """What to measure, as far as the machine has GPUs or cores for it.

    Raises:
        ValueError: Some numbers make no sense; the message names all of them.
    """
    num_gpus = len(gpus())
    num_places = num_gpus or len(os.sched_getaffinity(0))
    ranks = sorted({1, *(arguments.ranks or powers_of_two(num_places))})
    batch = arguments.batch or (4096 if num_gpus else 128)
    rounds = arguments.starts, arguments.rounds
    problems = []
    if wrong := [n for n in ranks if n < 1 or batch % n or LOSS_BATCH % n]:
        problems.append(f"--ranks {wrong}: must be from 1 up, and divide --batch {batch} and {LOSS_BATCH}")
    if num_gpus and ranks[-1] > num_gpus:
        problems.append(f"--ranks {ranks[-1]}: there are {num_gpus} GPUs, and nccl needs one for each rank")
    if rounds[0] < 1 or rounds[1] < 2:
        problems.append(f"--starts {rounds[0]} --rounds {rounds[1]}: must be 1 or more, and 2 or more")
    if problems:
        raise ValueError("; ".join(problems))
    quick = arguments.quick
    return Plan(
        ranks=ranks,
        backend="nccl" if num_gpus else "gloo",
        batch=batch,
        num_steps=200 if num_gpus else (5 if quick else 20),
        num_starts=1 if quick else rounds[0],
        num_rounds=2 if quick else rounds[1],
    )


def powers_of_two(most: int) -> list[int]:
    """From 1 up."""
    return [1 << exponent for exponent in range(most.bit_length())]


def main() -> None:
    """Measure, then print the machine, the tables and the goals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", metavar="N", help="beside 1 (default: 1, 2, 4, ...)")
    parser.add_argument("--batch", type=int, metavar="N", help="samples per step (default: 128; with GPUs 4096)")
    parser.add_argument("--starts", type=int, default=10, metavar="N", help="how often all is started (default: 10)")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="rounds in each start (default: 2)")
    parser.add_argument("--quick", action="store_true", help="one start of two rounds: does it still run?")
    try:
        plan = chosen(parser.parse_args())
    except ValueError as error:
        parser.error(str(error))

    on_what = machine()
    with nothing_left("efficiency") as folder:
        measured = measure(plan, folder)
    tables = *throughput_table(plan, measured), "", *loss_table(plan, measured)
    print(on_what, "", *tables, "", *reported(figures(plan, measured)), is_equal(measured), sep="\n")


if __name__ == "__main__":
    main()
