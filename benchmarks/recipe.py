"""Measure the training time of a model of names to the same loss, beside the usual recipe.

    python benchmarks/recipe.py                           # the embedded names: five rounds, about six minutes
    python benchmarks/recipe.py --data names.csv --rounds 1 --epochs 1 --own-epochs 2
    python benchmarks/recipe.py --quick                   # one short round, as a trial

The usual recipe holds all windows in memory as one-hot floats. The recipe has an item-by-item `Dataset` behind a
`DataLoader`, `nn.LSTM`, Adam, and a `loss.item()` at every step. One process has all cores or the GPU. Our way is
`tasks.char_lstm.train`, which `dispatch.run` runs in one rank per core or GPU. Both train the same model on the same
windows with the same loss. The same function evaluates both on the same held-out names.

On a CPU, these differences make our way faster:

- The layers start with larger input weights, which halves the steps (see `CharLSTM`).
- The LSTM runs once per distinct prefix of a batch instead of once per row and position. The work is a third at
  128 windows, and a quarter at 512, so larger batches cost less per window.
- All windows are in memory as bytes, and one indexing operation returns a batch.
- The dense layer starts from the characters' frequencies.
- Adam is fused.
- The loss is read at every hundredth step.

Each round trains both from the start, in turn, with its own seed, and evaluates after each epoch. The measure is the
training time from names in memory to the first evaluation with the recipe's best loss or a lower one. The time does not
include evaluations, imports and the start of processes. A round that does not count covers the latter two.

This process imports only the standard library. Other processes run the measured programs.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

from figures import Figure, at_least, gpus, report
from running import SERVE, Cluster, Program, asked, nothing_left, take_turns

GOAL = 4.0
GOAL_ON_GPU = 10.0
TIME_LIMIT = 1800.0
"""Timeout for one training, in seconds."""

SETUP = f"""{SERVE}
import time
import torch
from tasks.char_lstm import Hyperparameters, evaluate, windows
from tasks.names import load_names, split_by_name

def names_of(uri, seed):
    return split_by_name(load_names(uri).names, Hyperparameters().held_out, seed)
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

def train(data, seed, epochs, batch_size, learning_rate):
    training, held_out = names_of(data, seed)
    held_out = windows(held_out)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    points = []
    began = time.perf_counter()
    torch.manual_seed(seed)
    dataset = Names(windows(training))
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=True)
    model = LSTM(dropout=0.1).to(device)
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

def train(data, seed, epochs, batch_size, learning_rate):
    training, held_out = names_of(data, seed)
    gang = Gang(ranks_per_worker=int(sys.argv[2]), max_restarts=0)
    told = {{"epochs": epochs, "batch_size": batch_size, "learning_rate": learning_rate}}
    hp = Hyperparameters(seed=seed, log_interval=100, **told)
    prepared, epochs = dispatch.run(client, in_rank, training, held_out, hp, gang=gang).result()[0]
    return [(prepared + seconds, loss) for seconds, (_, loss) in zip(accumulate(s for s, _ in epochs), epochs)]

with Client(scheduler_file=sys.argv[1]) as client:
    serve(train)
"""


Curve = list[tuple[float, float]]
"""Seconds of training and held-out loss after each epoch."""


def seconds_to(loss: float, curve: Curve) -> float:
    """Return the seconds to the first evaluation with this loss or a lower one. Infinity if no evaluation has it."""
    return next((seconds for seconds, found in curve if found <= loss), float("inf"))


def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, list[Curve]]:
    """Train by all ways in turn, each round with its own seed."""
    cluster = Cluster(folder / "cluster", 1)
    num_ranks = arguments.ranks or len(gpus()) or len(os.sched_getaffinity(0))
    recipe = Program.serving(RECIPE, folder / "recipe")
    ours = Program.serving(OURS, folder / "ours", cluster.contact, str(num_ranks))
    settings = {
        "recipe": (recipe, arguments.epochs, 128, 0.005),
        "ours": (ours, arguments.own_epochs, 256 // num_ranks, 0.007),
    }
    seeds = dict.fromkeys(settings, 0)

    def train(way: str) -> Curve:
        program, *told = settings[way]
        seeds[way] += 1
        curve = program.call(arguments.data, seeds[way], *told, timeout=TIME_LIMIT)
        return [(seconds, loss) for seconds, loss in curve]

    found = take_turns({way: lambda it=way: train(it) for way in settings}, arguments.rounds)
    cluster.close()
    return found


def figures(found: dict[str, list[Curve]]) -> Iterator[Figure]:
    """Return the rows: seconds to the recipe's best loss, beside the recipe."""
    goals = [min(loss for _, loss in curve) for curve in found["recipe"]]
    times = {
        way: [seconds_to(goal, curve) for goal, curve in zip(goals, curves, strict=True)]
        for way, curves in found.items()
    }
    what = "pet names, time to the usual recipe's best held-out loss"
    goal = at_least(GOAL_ON_GPU if gpus() else GOAL)
    yield Figure.beside("usual recipe", times["recipe"], what=what, here=times["ours"], goals=goal)


def main() -> None:
    """Measure, and print the table."""
    arguments = asked(
        __doc__,
        data=("", "", "a file of names; the embedded ones without it"),
        rounds=(5, 1, "rounds that count"),
        epochs=(6, 1, "epochs of the recipe"),
        own_epochs=(3, 1, "epochs of ours"),
        ranks=(0, 0, "ranks of ours on one worker; 0 for one per GPU, or per core"),
    )
    if arguments.data and "://" not in arguments.data:
        arguments.data = str(Path(arguments.data).resolve())
    with nothing_left("recipe") as folder:
        found = measure(folder, arguments)
    report(figures(found), arguments.on)


if __name__ == "__main__":
    main()
