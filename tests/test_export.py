"""`export_safetensors` writes files that other tools can read, from a state that is sharded over ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from flytekit import task, workflow
from flytekit.types.directory import FlyteDirectory
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from flytekitplugins.daskpytorch import Gang, SpawnDDP, current_rank, export_safetensors
from gangs import run_ranks


def weights() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))


def sharded() -> nn.Module:
    model = weights()
    for part in (*model, model):
        fully_shard(part, mesh=init_device_mesh("cpu", (current_rank().world_size,)))
    return model


def export_one_file(directory: Path) -> dict[str, Any]:
    state = get_model_state_dict(sharded())
    return {"folder": export_safetensors(state, directory / "weights")}


def test_a_sharded_state_is_written_whole(tmp_path: Path) -> None:
    ranks = run_ranks(export_one_file, 2, tmp_path)
    assert [found["folder"] for found in ranks] == [str(tmp_path / "weights")] * 2
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["model.safetensors"]
    read, wanted = load_file(tmp_path / "weights" / "model.safetensors"), weights().state_dict()
    assert read.keys() == wanted.keys()
    assert all(torch.equal(read[name], wanted[name]) for name in wanted)


def export_in_parts(directory: Path) -> dict[str, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=3, n_head=2, n_embd=16, vocab_size=50, n_positions=8))
    mesh = init_device_mesh("cpu", (current_rank().world_size,))
    for part in (*model.transformer.h, model):
        fully_shard(part, mesh=mesh)
    state = get_model_state_dict(model)
    folder = directory / "gpt"
    export_safetensors(state, folder, max_file_size=10_000)
    if current_rank().is_main:
        model.config.save_pretrained(folder)
    return {
        "whole": {name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in state.items()}
    }


def test_transformers_reads_what_several_ranks_have_written(tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    wanted = run_ranks(export_in_parts, 2, tmp_path)[0]["whole"]
    folder = tmp_path / "gpt"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert index["metadata"]["total_size"] == sum(value.numel() * value.element_size() for value in wanted.values())
    for name, file in index["weight_map"].items():
        with safe_open(folder / file, "pt") as opened:
            assert torch.equal(opened.get_tensor(name), wanted[name])
    read = GPT2LMHeadModel.from_pretrained(folder).state_dict()
    assert all(torch.equal(read[name], wanted[name]) for name in read)


def test_tied_weights_are_written_under_both_names(tmp_path: Path) -> None:
    tied = torch.ones(3)
    export_safetensors({"a": tied, "b": tied, "c": torch.ones(2, 2).t()}, tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == {"a", "b", "c"}


def test_a_value_that_is_no_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"step is a int\. Give it the model's own state alone"):
        export_safetensors({"weight": torch.ones(1), "step": 3}, tmp_path)


def test_outside_a_task_a_folder_must_be_named() -> None:
    with pytest.raises(ValueError, match="outside a Flyte task, name the folder"):
        export_safetensors({"weight": torch.ones(1)})


def export_what_differs(directory: Path) -> dict[str, Any]:
    rank = current_rank().rank
    with pytest.raises(ValueError, match="ranks 0 and 1 differ in of rank 0, of rank 1"):
        export_safetensors({f"of rank {rank}": torch.ones(1)}, directory / "weights")
    return {}


def test_names_that_differ_are_an_error_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(export_what_differs, 2, tmp_path)
    assert not (tmp_path / "weights").exists()


def export_where_one_cannot_write(directory: Path) -> dict[str, Any]:
    state = {"a": torch.ones(4), "b": torch.ones(4)}
    folder = directory / "weights"
    folder.mkdir(exist_ok=True)
    (folder / "model-00002-of-00002.safetensors").mkdir(exist_ok=True)  # is to be rank 1's file
    with pytest.raises(OSError, match="rank 1 could not write its file: IsADirectoryError"):
        export_safetensors(state, folder, max_file_size=16)
    return {}


def test_a_file_that_cannot_be_written_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(export_where_one_cannot_write, 2, tmp_path)
    assert not (tmp_path / "weights" / "model.safetensors.index.json").exists()


@task(task_config=SpawnDDP(nproc=2, gang=Gang(hints=False)))
def train() -> FlyteDirectory:
    folder = export_safetensors(get_model_state_dict(sharded()))
    return FlyteDirectory(folder, remote_directory=False)


@task
def use(folder: FlyteDirectory) -> list[str]:
    read = load_file(Path(folder) / "model.safetensors")
    return [name for name, value in weights().state_dict().items() if torch.equal(value, read[name])]


@workflow
def training() -> list[str]:
    return use(folder=train())


def test_a_task_returns_it_to_the_next() -> None:
    assert training() == ["0.weight", "0.bias", "1.weight", "1.bias"]
