"""Sharded checkpoints of real process groups are written by all ranks, and read by other numbers of ranks."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from flytekitplugins.daskpytorch.context import current_rank
from flytekitplugins.daskpytorch.protocol.checkpoints import CheckpointEntry
from gangs import run_ranks
from sharded_rank import Rank
from sharded_states import assert_same, make, state_of, whole


def save_all(base: str, directory: Path) -> dict[str, Any]:
    model, optimizer = make(seed=1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    entry = Rank(base).save(state_of(model, optimizer), 3, loss=0.5)
    others = {"alike": save_alike(f"{base}/alike"), "refused": be_refused(f"{base}/refused")}
    return {"entry": entry, "saved": whole(model, optimizer), **others}


def save_alike(base: str) -> CheckpointEntry:
    """A checkpoint of a state of which some is the same on all ranks, and some not."""
    rank = Rank(base)
    tensors = {str(number): torch.full((1000,), float(number)) for number in range(8)}
    own = {f"only {current_rank().rank}": torch.full((2,), float(current_rank().rank))}
    rank.checkpoints.save({"alike": tensors, "own": own, "epoch": 3}, 1, {})
    return rank.commit()


def be_refused(base: str) -> list[str]:
    """What each of the ranks is told, of what only they together or another one can know; and then all is well."""
    rank, texts = Rank(base), []
    number = current_rank().rank
    for state, step in (({"a": 1}, number), ({"a": Path() if number == 1 else 1}, 5)):
        try:
            rank.checkpoints.save(state, step, {})
        except (ValueError, RuntimeError, TypeError) as error:
            texts.append(f"{type(error).__name__}: {error}")
    rank.save({"a": 1}, 5)
    return texts


def filled(seed: int, fill: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Another training, whose state is filled."""
    model, optimizer = make(seed)
    state = state_of(model, optimizer)
    fill(state)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return whole(model, optimizer)


def load_all(base: str, entry: CheckpointEntry, directory: Path) -> dict[str, Any]:
    """Load it, and see what torch alone makes of the same files."""
    checkpoints = Rank(base, [*damaged_for_one_rank(base, entry), entry], attempt=1).checkpoints
    steps: list[int | None] = []
    by_torch = filled(3, lambda state: dcp.load(state, checkpoint_id=entry.uri))
    loaded = filled(2, lambda state: steps.append(checkpoints.load(state)))
    return {"by torch": by_torch, "loaded": loaded, "steps": steps}


def damaged_for_one_rank(base: str, entry: CheckpointEntry) -> list[CheckpointEntry]:
    """A newer checkpoint, of which a file is missing that the first rank does not read."""
    if "://" in base or current_rank().world_size != 2:
        return []
    folder = Path(base) / "damaged"
    if current_rank().is_main:
        shutil.copytree(entry.uri, folder)
        for part in folder.glob("__1_*.distcp"):
            part.unlink()
    dist.barrier()
    return [replace(entry, folder=base, shards=folder.name, step=9)]


def test_a_training_under_fsdp2_comes_back_bit_for_bit(tmp_path: Path) -> None:
    base, first, again = (tmp_path / name for name in ("base", "first", "again"))
    for folder in (first, again):
        folder.mkdir()
    ranks = run_ranks(partial(save_all, str(base)), 2, first)
    assert ranks[0]["entry"].metrics == {"loss": 0.5}
    found = run_ranks(partial(load_all, str(base), ranks[0]["entry"]), 2, again)[0]
    assert found["steps"] == [3]
    for name in ("by torch", "loaded"):
        assert_same(found[name], ranks[0]["saved"])
    assert_written_once(Path(ranks[0]["alike"].uri))
    different = (
        "ValueError: save_sharded needs the same step on all ranks, but the ranks gave rank 0 step 0, rank 1 step"
    )
    assert all(rank["refused"][0] == f"{different} 1" for rank in ranks)
    assert ranks[0]["refused"][1].startswith("RuntimeError: rank 1 cannot save its part: TypeError: a of the state")
    assert ranks[1]["refused"][1].startswith("TypeError: a of the state")


def in_two_dimensions(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model under tensor parallelism and FSDP2 on four ranks, else under FSDP2 alone."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 5))
    size = current_rank().world_size
    shape = (2, 2) if size == 4 else (size, 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    if size == 4:
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def save_in_two_dimensions(base: str, directory: Path) -> Any:
    model, optimizer = in_two_dimensions(seed=1)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    return Rank(base).save(state_of(model, optimizer), 3), whole(model, optimizer)


def load_in_one_dimension(base: str, entry: CheckpointEntry, directory: Path) -> Any:
    model, optimizer = in_two_dimensions(seed=2)
    state = state_of(model, optimizer)
    assert Rank(base, [entry], attempt=1).checkpoints.load(state) == 3
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return whole(model, optimizer)


@pytest.mark.slow
def test_tensor_parallelism_with_fsdp2_on_four_ranks_is_loaded_by_two_and_three(tmp_path: Path) -> None:
    for name in ("4", "2", "3"):
        (tmp_path / name).mkdir()
    base = str(tmp_path / "base")
    entry, saved = run_ranks(partial(save_in_two_dimensions, base), 4, tmp_path / "4")[0]
    for size in (2, 3):
        loaded = run_ranks(partial(load_in_one_dimension, base, entry), size, tmp_path / str(size))[0]
        assert_same(loaded, saved)


def assert_written_once(folder: Path) -> None:
    """What all ranks have is written by one of them, and each writes about as much."""
    places = pickle.loads((folder / ".metadata").read_bytes()).storage_data
    alike = [f"alike.{number}" for number in range(8)]
    assert sorted(index.fqn for index in places) == [*alike, "epoch", "own.only 0", "own.only 1"]
    [own] = [place for index, place in places.items() if index.fqn == "own.only 1"]
    assert own.relative_path.startswith("__1_")
    sizes = [sum(path.stat().st_size for path in folder.glob(f"__{rank}_*")) for rank in (0, 1)]
    assert max(sizes) < 1.5 * min(sizes)
