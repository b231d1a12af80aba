"""Checkpoints of real gangs: FSDP2's sharded state is refused, and all nodes can load the best one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import Client, LocalCluster
from torch import distributed as dist

import fault_training as ft
from flytekitplugins.daskpytorch import Gang, Keep, current_rank
from flytekitplugins.daskpytorch.node import fork_client
from flytekitplugins.daskpytorch.protocol.framing import Connection
from flytekitplugins.daskpytorch.protocol.observer import Observer
from gangs import on_this_machine, put_driver_elsewhere
from processes import nothing_left_behind, until


def train_until_kept(folder: str) -> float:
    """Save, and be killed when that is safe; the mean of what is loaded then."""
    rank = current_rank()
    state = rank.checkpoint.load()
    if state is None:
        rank.checkpoint.save({"weights": torch.full((1 << 20,), 3.0)}, 1)
        until(lambda: Path(folder, "kept").exists(), "the checkpoint to be safe")
        os.kill(os.getpid(), signal.SIGKILL)
    return float(state["weights"].mean())


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_not_a_byte_of_a_checkpoint_travels_on_the_drivers_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_elsewhere: bool
) -> None:
    class Watch(Observer):
        def on_checkpoint(self, step: int) -> None:
            (tmp_path / "kept").touch()

    sizes: list[int] = []
    read: Callable[[Connection, int], bytes] = Connection.read

    def counting(self: Connection, size: int) -> bytes:
        data = read(self, size)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(Connection, "read", counting)
    if is_elsewhere:
        put_driver_elsewhere(monkeypatch)
    gang = on_this_machine(train_until_kept, str(tmp_path), num_ranks=1, observers=[Watch()])
    assert gang.result() == [3.0]
    assert (sum(sizes) > 4 << 20) == is_elsewhere


LOSSES = {1: 0.5, 2: 0.1, 3: 0.4, 4: 0.9, 5: 0.3, 6: 0.8, 7: 0.6, 8: 0.7}


def train_for_the_best(folder: str) -> dict[str, Any]:
    """Save eight states, of which the second is the best and the fourth the last before a rank is killed."""
    rank = current_rank()
    start = (rank.checkpoint.load() or {"step": 0})["step"]
    for step in range(start + 1, 9):
        rank.checkpoint.save(
            {"step": step, "weights": torch.full((1_000,), LOSSES[step])}, step, {"loss": LOSSES[step]}
        )
        if step == 4 and start == 0:
            ft._await(folder, "kept-4")
            if rank.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()
    best = rank.checkpoint.load(best=True)
    assert best is not None
    assert rank.checkpoint.loaded is not None
    metrics = dict(rank.checkpoint.loaded.metrics)
    last = rank.checkpoint.load(step=8)
    assert last is not None
    return {
        "start": start,
        "best": (best["step"], float(best["weights"].mean()), metrics),
        "last": last["step"],
        "kept": [(kept.step, kept.place) for kept in rank.checkpoint.list()],
    }


def test_every_node_loads_the_best_that_was_saved_before_the_gang_started_again(
    launch: ft.Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ft, "train", train_for_the_best)
    keep = Keep(last=1, best=1, metric="loss")
    with (
        nothing_left_behind(),
        LocalCluster(n_workers=2, processes=False, dashboard_address=None) as local,
        Client(local) as client,
    ):
        watched = launch(client, gang=Gang(keep=keep))
        results = watched.futures.result()
        fork_client.shutdown()
    for result in results:
        assert result["start"] == 4
        assert result["best"] == (2, pytest.approx(0.1), {"loss": 0.1})
        assert result["last"] == 8
        assert result["kept"] == [(2, None), (8, None)]
