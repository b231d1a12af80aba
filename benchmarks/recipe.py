"""How soon a model of names has learnt as much, beside the recipe as it is usually written.

    python benchmarks/recipe.py                           # the embedded names: five rounds, some six minutes
    python benchmarks/recipe.py --data names.csv --rounds 1 --epochs 1 --own-epochs 2 --own-batch 2048
    python benchmarks/recipe.py --quick                   # one short round: does it still run?

The recipe: all windows as one-hot floats in memory, an item-by-item `Dataset` behind a `DataLoader`, `nn.LSTM`, Adam,
one process that has all cores (or the GPU), a `loss.item()` at every step. Ours: `tasks.char_lstm.train`, by
`dispatch.run` in a rank per core, or per GPU. Both train the same model on the same windows with the same loss, and are
judged by the same function on the same held-out names. `recipe, our settings` is the recipe with the initial weights of
`CharLSTM` and with our batch size and learning rate, to see what comes of these alone.

Where the gain comes from, on a CPU: the layers start with weights that let them see their inputs (`CharLSTM` has why),
which alone halves the steps; the LSTM runs once per distinct prefix of a batch instead of once per row and position
(three times less work at 128 windows, four times at 512, so that larger batches cost less per window); all windows are
in memory as bytes, and a batch is one indexing operation; the dense layer starts from the characters' frequencies; Adam
is fused; the loss is read at every hundredth step.

Each round trains all of them from the start, in turn, with a seed of its own, and evaluates them after each epoch. The
measure is the training time, from names in memory to the first evaluation that is as good as the recipe's best;
evaluations, imports and the start of processes are left out for all, the latter by a round that is not counted.

This process imports nothing but the standard library; what is measured runs in processes of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from figures import Figure, Goal, reported
from launch import gpus, machine
from running import ROOT, Cluster, Program, nothing_left

GOAL = 4.0
GOAL_ON_GPU = 10.0
TIME_LIMIT = 1800.0
"""Seconds for one training."""

SETUP = """
import json
import sys
import time
import torch
from tasks.char_lstm import Hyperparameters, evaluate, windows
from tasks.names import load_names, split_by_name

def names_of(uri, seed):
    return split_by_name(load_names(uri).names, Hyperparameters().held_out, seed)

def serve(train):
    print("@ready", flush=True)
    for line in sys.stdin:
        print("@done", json.dumps(train(**json.loads(line))), flush=True)
"""

RECIPE = f"""{SETUP}
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from tasks.char_lstm import BLANK, NUM_SYMBOLS, CharLSTM

class Names(Dataset):
    def __init__(self, cut):
        self.characters = functional.one_hot(cut[:, :-1].long(), NUM_SYMBOLS).float()
        self.targets = cut[:, 1:].long()

    def __len__(self):
        return len(self.characters)

    def __getitem__(self, index):
        return self.characters[index], self.targets[index]

class LSTM(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.lstm = nn.LSTM(NUM_SYMBOLS, 128, num_layers=4, dropout=dropout, batch_first=True)
        self.dense = nn.Linear(128, NUM_SYMBOLS)

    def forward(self, characters):
        return self.dense(self.lstm(characters)[0])

def train(data, seed, epochs, batch_size, learning_rate, has_our_weights):
    training, held_out = names_of(data, seed)
    held_out = windows(held_out)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    points = []
    began = time.perf_counter()
    torch.manual_seed(seed)
    dataset = Names(windows(training))
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=True)
    model = LSTM(dropout=0.1).to(device)
    if has_our_weights:
        model.load_state_dict(CharLSTM().state_dict())
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    criterion = nn.CrossEntropyLoss(ignore_index=BLANK)
    for epoch in range(epochs):
        model.train()
        for characters, targets in loader:
            logits = model(characters.to(device))
            loss = criterion(logits.transpose(1, 2), targets.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()
        paused = time.perf_counter()
        points.append((paused - began, evaluate(CharLSTM.from_state_dict(model.state_dict()), held_out).loss))
        began += time.perf_counter() - paused
    return points

serve(train)
"""

OURS = f"""{SETUP}
from itertools import accumulate
from distributed import Client
from flytekitplugins.daskpytorch import Gang, dispatch
from tasks import char_lstm

def in_rank(training, held_out, hp):
    began = time.perf_counter()
    cut = windows(training)
    prepared = time.perf_counter() - began
    epochs = char_lstm.train(cut, windows(held_out), hp).epochs
    return prepared, [(epoch.epoch_seconds, epoch.held_out_loss) for epoch in epochs]

def train(data, seed, has_our_weights, **hyperparameters):
    training, held_out = names_of(data, seed)
    gang = Gang(ranks_per_worker=int(sys.argv[2]), max_restarts=0)
    hp = Hyperparameters(seed=seed, log_interval=100, **hyperparameters)
    prepared, epochs = dispatch.run(client, in_rank, training, held_out, hp, gang=gang).result()[0]
    return [(prepared + seconds, loss) for seconds, (_, loss) in zip(accumulate(s for s, _ in epochs), epochs)]

with Client(scheduler_file=sys.argv[1]) as client:
    serve(train)
"""


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """Who trains, and how."""

    name: str
    program: Program
    epochs: int
    batch_size: int
    """Per step of the whole gang."""
    learning_rate: float
    num_ranks: int = 1
    has_our_weights: bool = True
    """Whether the first weights are those of `CharLSTM`."""

    def train(self, data: str, seed: int) -> list[tuple[float, float]]:
        """Train from the start; seconds of training and the held-out loss after them, at each evaluation."""
        hyperparameters = {
            "epochs": self.epochs,
            "batch_size": self.batch_size // self.num_ranks,
            "learning_rate": self.learning_rate,
            "has_our_weights": self.has_our_weights,
        }
        self.program.tell(json.dumps({"data": data, "seed": seed, **hyperparameters}))
        return [(seconds, loss) for seconds, loss in json.loads(self.program.hear("done", TIME_LIMIT))]


def best(curve: list[tuple[float, float]]) -> tuple[float, float]:
    """The lowest loss, and when it was there for the first time."""
    return min(curve, key=lambda point: point[1])


def seconds_to(loss: float, curve: list[tuple[float, float]]) -> float:
    """At the first evaluation that was so good; infinite: none was."""
    return next((seconds for seconds, here in curve if here <= loss), float("inf"))


def measure(contestants: list[Contestant], data: str, rounds: int) -> dict[str, list[float]]:
    """Train them in turn; the seconds to the first one's best loss, by round."""
    times: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    for seed in range(rounds):
        goal = float("inf")
        for contestant in contestants:
            curve = contestant.train(data, seed)
            if goal == float("inf"):
                goal = best(curve)[1]
            times[contestant.name].append(seconds_to(goal, curve))
            lowest_at, lowest = best(curve)
            print(
                f"round {seed + 1}: {contestant.name} {times[contestant.name][-1]:.1f} s to {goal:.3f} nats; "
                f"its best: {lowest:.3f} after {lowest_at:.1f} s of {curve[-1][0]:.1f}",
                file=sys.stderr,
            )
    return times


def table(contestants: list[Contestant], times: dict[str, list[float]]) -> list[str]:
    """A row for each, beside the first."""
    rows = []
    recipe = times[contestants[0].name]
    for contestant in contestants:
        taken = times[contestant.name]
        ratios = [one / other for one, other in zip(recipe, taken, strict=True)]
        rows.append(
            f"| {contestant.name} | {contestant.batch_size} | {contestant.learning_rate:g} | "
            f"{statistics.median(taken):.1f} s ({min(taken):.1f}-{max(taken):.1f}) | "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) |"
        )
    return rows


def main() -> None:
    """Measure, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="", help="a file of names (default: the embedded ones)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default: 5)")
    parser.add_argument("--epochs", type=int, default=6, help="of the recipe (default: 6)")
    parser.add_argument("--batch", type=int, default=128, help="the recipe's windows per step (default: 128)")
    parser.add_argument("--rate", type=float, default=0.005, help="the recipe's learning rate (default: 0.005)")
    parser.add_argument("--own-epochs", type=int, default=3, help="ours (default: 3)")
    parser.add_argument("--own-batch", type=int, default=256, help="ours, all ranks together (default: 256)")
    parser.add_argument("--own-rate", type=float, default=0.007, help="ours (default: 0.007)")
    parser.add_argument("--ranks", type=int, default=0, help="ours, on one worker (default: one per GPU, or per core)")
    parser.add_argument("--quick", action="store_true", help="one round of few epochs")
    asked = parser.parse_args()
    if asked.quick:
        asked.rounds, asked.epochs, asked.own_epochs = 1, 1, 1
    data = str(Path(asked.data).resolve()) if asked.data and "://" not in asked.data else asked.data
    num_gpus = len(gpus())
    num_ranks = asked.ranks or num_gpus or len(os.sched_getaffinity(0))
    own = {"batch_size": asked.own_batch, "learning_rate": asked.own_rate}
    with nothing_left("recipe") as folder:
        cluster = Cluster(folder / "cluster", 1)
        recipe = Program.of(RECIPE, folder / "recipe", environment={"PYTHONPATH": str(ROOT)})
        ours = Program.of(OURS, folder / "ours", cluster.contact, str(num_ranks), environment={"PYTHONPATH": str(ROOT)})
        for program in (recipe, ours):
            program.hear("ready")
        contestants = [
            Contestant(
                name="recipe",
                program=recipe,
                epochs=asked.epochs,
                batch_size=asked.batch,
                learning_rate=asked.rate,
                has_our_weights=False,
            ),
            Contestant(name="ours", program=ours, epochs=asked.own_epochs, num_ranks=num_ranks, **own),
            Contestant(name="recipe, our settings", program=recipe, epochs=asked.own_epochs, **own),
        ]
        for contestant in reversed(contestants):
            replace(contestant, epochs=1).train(data, asked.rounds)
        times = measure(contestants, data, asked.rounds)
        cluster.close()
    goal = GOAL_ON_GPU if num_gpus else GOAL
    print(machine())
    print("| training | windows per step | learning rate | to the recipe's best loss | the recipe is |")
    print("| --- | --- | --- | --- | --- |")
    print("\n".join(table(contestants, times)))
    what = "pet names, time to the usual recipe's best held-out loss"
    found = Figure.beside("usual recipe", times["recipe"], what=what, here=times["ours"], goals=[Goal(bound=goal)])
    print(*reported([found]), sep="\n")


if __name__ == "__main__":
    main()
