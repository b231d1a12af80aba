"""Gangs that lose a rank in mid-epoch see each item once: case 40 of the project's list of faults."""

import pytest
import torch
import torch.distributed as dist
from distributed import Client
from torch.utils.data import TensorDataset

import fault_training as ft
from flytekitplugins.daskpytorch import Gang, current_rank
from flytekitplugins.daskpytorch.data import RankLoader
from processes import Cluster

NUMBERS = TensorDataset(torch.arange(50))
NUM_EPOCHS = 2


def see(folder: str, fault: str) -> list[list[int]]:
    """Two epochs of what the ranks see together at each step; breaks in the first one, two steps after a checkpoint."""
    rank = current_rank()
    loader = RankLoader(NUMBERS, 4, seed=5, num_workers=2, prefetch_factor=4, persistent_workers=True)
    steps: list[list[int]] = []
    if (state := rank.checkpoint.load()) is not None:
        loader.load_state_dict(state["loader"])
        steps = state["steps"]
    ft._leave(folder, f"start-{rank.rank}", str(len(steps)))
    while loader.epoch < NUM_EPOCHS:
        for (items,) in loader:
            if len(steps) == ft.BREAKS_AT and rank.rank == 1 and not ft._has(folder, "broken"):
                ft._await(folder, f"kept-{ft.SAVED_AT}")
                ft._leave(folder, "broken", fault)
                ft.FAULTS[fault]()
            shares: list[list[int]] = [[]] * rank.world_size
            dist.all_gather_object(shares, items.tolist())
            steps.append([item for share in shares for item in share])
            if len(steps) == ft.SAVED_AT:
                rank.checkpoint.save({"loader": loader.state_dict(), "steps": steps}, len(steps))
    return steps


def undisturbed() -> list[int]:
    loader = RankLoader(NUMBERS, 1, seed=5, rank=0, world_size=1)
    return [int(item) for _ in range(NUM_EPOCHS) for (item,) in loader]


def check(steps: list[list[int]], starts: list[int], world_size: int) -> None:
    assert starts == [0, ft.SAVED_AT]
    assert max(map(len, steps[ft.SAVED_AT :])) == 4 * world_size
    assert [item for step in steps for item in step] == undisturbed()


def test_one_rank_goes_on_with_the_next_item_of_two(
    breakable: Cluster, client: Client, launch: ft.Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ft, "train", see)
    watched = launch(client, "wait", gang=Gang(min_workers=1))
    watched.wait_for("broken")
    breakable.kill_worker(1)
    check(watched.futures[0].result(), watched.starts(0), world_size=1)
