"""How fast a trained model invents names, beside a loop over names and characters.

    python benchmarks/sampling.py                         # five rounds, some two minutes
    python benchmarks/sampling.py --quick                 # one round of few names: does it still run?

Both have the same model, trained for two epochs on the embedded names, and invent as many different names that are not
among those. `one by one` is the usual loop: one name, one character, one forward pass of `nn.LSTM` over its last eight
characters at a time. `batched` is `tasks.char_lstm.sample_names`. They draw from the same distribution with generators
of their own, so the names differ; the mean length of the names is printed to show that they are alike.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from figures import Figure, Goal, reported
from launch import machine
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tasks.char_lstm import ALPHABET, BLANK, CONTEXT, STOP, CharLSTM, Hyperparameters, sample_names, train, windows
from tasks.names import load_names, split_by_name

TEMPERATURE = 0.8
MAX_LENGTH = 16
GOAL = 50.0


def trained(known: list[str]) -> CharLSTM:
    """A model that has seen the names twice."""
    training, held_out = split_by_name(known, 0.1, 0)
    result = train(windows(training), windows(held_out), Hyperparameters(epochs=2))
    return CharLSTM.from_state_dict(result.state_dict)


@torch.no_grad()
def one_by_one(model: CharLSTM, count: int, known: set[str], seed: int) -> list[str]:
    """Invent names in the usual way."""
    generator = torch.Generator().manual_seed(seed)
    found: set[str] = set()
    while len(found) < count:
        text = [BLANK] * CONTEXT
        while len(text) <= CONTEXT + MAX_LENGTH and text[-1] != STOP:
            one_hot = functional.one_hot(torch.tensor([text[-CONTEXT:]]), len(ALPHABET)).float()
            logits = model.dense(model.lstm(one_hot)[0])[0, -1] / TEMPERATURE
            logits[BLANK] = -torch.inf
            text.append(int(logits.softmax(dim=0).multinomial(1, generator=generator)))
        name = "".join(ALPHABET[index] for index in text[CONTEXT:-1])
        if text[-1] == STOP and sum(map(str.isalpha, name)) >= 2 and name not in known:
            found.add(name)
    return sorted(found)


def timed(sample: Callable[[int], list[str]], seed: int) -> tuple[float, list[str]]:
    """Seconds, and the names."""
    began = time.perf_counter()
    names = sample(seed)
    return time.perf_counter() - began, names


def main() -> None:
    """Measure, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (default: 5)")
    parser.add_argument("--names", type=int, default=1000, help="how many to invent (default: 1000)")
    parser.add_argument("--quick", action="store_true", help="one round, few names")
    asked = parser.parse_args()
    if asked.quick:
        asked.rounds, asked.names = 1, 50
    known = load_names().names
    model = trained(known)
    ways: dict[str, Callable[[int], list[str]]] = {
        "one by one": lambda seed: one_by_one(model, asked.names, set(known), seed),
        "batched": lambda seed: sample_names(model, asked.names, exclude=known, seed=seed, temperature=TEMPERATURE),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    ways["batched"](asked.rounds)  # warms up
    for seed in range(asked.rounds):
        for way, sample in ways.items():
            seconds, names = timed(sample, seed)
            times[way].append(seconds)
            length = statistics.mean(map(len, names))
            print(f"round {seed + 1}: {way} {seconds:.2f} s, {len(names)} names of {length:.1f} letters on average")
    print(machine())
    for way, taken in times.items():
        print(f"| {way} | {statistics.median(taken):.3f} s ({min(taken):.3f}-{max(taken):.3f}) |")
    what = f"{asked.names} invented names"
    slow, fast = times["one by one"], times["batched"]
    found = Figure.beside("one name, one character at a time", slow, what=what, here=fast, goals=[Goal(bound=GOAL)])
    print(*reported([found]), sep="\n")


if __name__ == "__main__":
    main()
