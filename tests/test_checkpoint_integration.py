"""A model of FSDP2's in a real gang: its sharded state is refused, and gathered it survives a restart."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fault_training as ft
from flytekitplugins.daskpytorch import current_rank
from flytekitplugins.daskpytorch.node import fork_client
from processes import nothing_left_behind

GATHERED = StateDictOptions(full_state_dict=True, cpu_offload=True)


def train_under_fsdp(folder: str) -> dict[str, Any]:
    """Save the model as it is, which fails, and then gathered; go on from that with another model after a loss."""
    rank = current_rank()
    state = rank.checkpoint.load()
    model, optimizer = make(seed=1 if state is None else 2)
    if state is None:
        train(model, optimizer)
        try:
            rank.checkpoint.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, 3)
        except TypeError as refused:
            ft._leave(folder, f"refused-{rank.rank}", str(refused))
        rank.checkpoint.save(get_state_dict(model, optimizer, options=GATHERED), 4)
        ft._await(folder, "kept-4")
        before = weights(model)
        train(model, optimizer)
        torch.save((before, weights(model)), f"{folder}/weights-{rank.rank}")
        if rank.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    model_state, optimizer_state = state or get_state_dict(model, optimizer, options=GATHERED)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state, options=GATHERED)
    again = weights(model)
    train(model, optimizer)
    return {"again": again, "trained on": weights(model)}


def make(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for number in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 3), 1.0 + number + current_rank().rank)).square().sum().backward()
        optimizer.step()


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.full_tensor().detach() for parameter in model.parameters()]  # type: ignore[attr-defined]


def test_state_of_fsdp2_is_refused_by_all_ranks_and_comes_back_when_it_is_gathered_as_the_error_says(
    launch: ft.Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ft, "train", train_under_fsdp)
    with nothing_left_behind():
        watched = launch(2)
        results = watched.futures.result()
        fork_client.shutdown()
    refusals = [(watched.folder / f"refused-{rank}").read_text() for rank in range(2)]
    assert "is sharded: state['model']['0.weight'] is a DTensor of shape (4, 3)" in refusals[0]
    assert refusals[0] == refusals[1]
    assert watched.kept == [4]  # and not 3
    assert any("going on from step 4" in note for note in watched.notes), watched.notes
    for rank, result in enumerate(results):
        before, trained_on = torch.load(watched.folder / f"weights-{rank}")
        assert all(one.equal(other) for one, other in zip(before, result["again"], strict=True))
        assert all(one.equal(other) for one, other in zip(trained_on, result["trained on"], strict=True))
