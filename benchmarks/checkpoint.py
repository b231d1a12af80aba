"""What a checkpoint of a state that each rank has whole costs: how long a step waits, and until it is safe.

    python benchmarks/checkpoint.py                    # 500 MB, two ranks, five rounds: two minutes, a table at the end
    python benchmarks/checkpoint.py --quick            # 20 MB, one round: does it still run?

In each round, in turn, the ranks of one gang save by `rank.checkpoint.save` and by `torch.distributed.checkpoint`'s
`async_save` to the local disk. Of both: how long the call holds the step up (the slower rank's), how long until the
state is whole where a dead worker cannot take it along (for ours that is the driver's disk; for the other one the
ranks' own, which it is not), and how long the start of the next attempt takes to have it back in the tensors of both
ranks. Nothing else runs meanwhile, so the background has a core for itself.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from figures import Figure, Goal, reported
from launch import machine

Times = dict[str, list[float]]
"""Seconds by what they were for."""
WHATS = {"held up": "the step waits", "whole": "until it is whole", "loaded": "back in the tensors"}


def ours(tensors: dict[str, Any], step: int) -> tuple[float, float]:
    """When the call had returned, and when the state was written; that it has arrived is for the driver to say."""
    from flytekitplugins.daskpytorch import current_rank

    checkpoint = current_rank().checkpoint
    checkpoint.save(tensors, step)
    returned = time.time()
    checkpoint.flush()
    return returned, time.time()


def dcp(tensors: dict[str, Any], folder: str) -> tuple[float, float]:
    """The same of the peer's."""
    from torch.distributed import checkpoint

    saving: Any = checkpoint.async_save(tensors, checkpoint_id=folder)
    returned = time.time()
    saving.result()
    return returned, time.time()


def train(folder: str, size: int, rounds: int) -> list[dict[str, Any]]:
    """One record for each save of this rank; the last attempt says how long it took to load."""
    import torch
    import torch.distributed as dist
    from torch.distributed import checkpoint as peer

    from flytekitplugins.daskpytorch import current_rank

    rank = current_rank()
    tensors = {f"layer {index}": torch.ones(size // 40) for index in range(10)}  # ten tensors of four bytes a number
    dist.barrier()
    began = time.time()
    state = rank.checkpoint.load()
    if state is not None:
        for name, tensor in tensors.items():
            tensor.copy_(state[name])
        loaded = time.time() - began
        dist.barrier()
        began = time.time()
        peer.load(tensors, checkpoint_id=f"{folder}/{rounds - 1}")
        found = [{"who": "ours", "loaded": loaded}, {"who": "dcp", "loaded": time.time() - began}]
        return found + torch.load(f"{folder}/records-{rank.rank}")  # type: ignore[no-any-return]
    records = []
    for step in range(rounds + 1):  # the first warms up
        for who in ("ours", "dcp"):
            for tensor in tensors.values():
                tensor.add_(1)
            dist.barrier()
            began = time.time()
            returned, whole = ours(tensors, step) if who == "ours" else dcp(tensors, f"{folder}/{step - 1}")
            if step:
                records.append({"who": who, "step": step, "began": began, "held up": returned - began, "end": whole})
            dist.barrier()
            time.sleep(size / 2e8)  # until ours has arrived at the driver
    torch.save(records, f"{folder}/records-{rank.rank}")
    raise ConnectionResetError("this attempt has saved enough")


def measure(size: int, rounds: int) -> dict[str, Times]:
    """The seconds, by whose and what for."""
    from flytekitplugins.daskpytorch import Gang
    from flytekitplugins.daskpytorch.driver.futures import GangFutures
    from flytekitplugins.daskpytorch.driver.request import request_for
    from flytekitplugins.daskpytorch.driver.supervisor import Supervisor
    from flytekitplugins.daskpytorch.node.own_node import OwnNode
    from flytekitplugins.daskpytorch.protocol.observer import Observer

    arrived: dict[int, float] = {}

    class Clock(Observer):
        def kept(self, step: int) -> None:
            arrived[step] = time.time()

    times: dict[str, Times] = {who: {what: [] for what in WHATS} for who in ("ours", "dcp")}
    with tempfile.TemporaryDirectory() as folder:
        request = request_for(train, (folder, size, rounds), {}, Gang(ranks_per_worker=2))
        by_rank = GangFutures(Supervisor(request, OwnNode(), [Clock()]), 2).result()
    for together in zip(*by_rank, strict=True):
        who = together[0]["who"]
        if "loaded" in together[0]:
            times[who]["loaded"].append(max(record["loaded"] for record in together))
            continue
        times[who]["held up"].append(max(record["held up"] for record in together))
        end = arrived[together[0]["step"]] if who == "ours" else max(record["end"] for record in together)
        times[who]["whole"].append(end - together[0]["began"])
    return times


def cell(seconds: list[float]) -> str:
    """The median, and from where to where they go."""
    return f"{statistics.median(seconds):.2f} s ({min(seconds):.2f}-{max(seconds):.2f})"


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=500.0, metavar="MB", help="of the state (default: 500)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="saves of each kind (default: 5)")
    parser.add_argument("--quick", action="store_true", help="small: does it still run?")
    arguments = parser.parse_args()
    size, rounds = (20.0, 1) if arguments.quick else (arguments.size, arguments.rounds)
    on_what = machine()
    print(f"saving {size:g} MB {rounds + 1} times in each way ...", file=sys.stderr)
    times = measure(int(size * 1e6), rounds)
    print(on_what, f"\n| {size:g} MB, two ranks | ours | `async_save` | ratio |", "|---|---|---|---|", sep="\n")
    for what, text in WHATS.items():
        ratio = statistics.median(times["ours"][what]) / statistics.median(times["dcp"][what])
        print(f"| {text} | {cell(times['ours'][what])} | {cell(times['dcp'][what])} | {ratio:.2f} |")
    print("", *reported(figures(times, size)), sep="\n")


def figures(times: dict[str, Times], size: float) -> Iterator[Figure]:
    """What was to be reached, and what was."""
    for what, text in WHATS.items():
        described = f"{size:g} MB by `save`, two ranks: {text}"
        theirs, goals = times["dcp"][what], [Goal(bound=1.0, at_most=True)]
        yield Figure.beside("`async_save`", theirs, share=True, what=described, here=times["ours"][what], goals=goals)


if __name__ == "__main__":
    main()
