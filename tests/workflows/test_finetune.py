"""The fine-tuning runs in the real `pyflyte`, and a gang whose rank is killed goes on from its position."""

import json
import os
import re
import signal
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from distributed import Client, LocalCluster

from flytekitplugins.daskpytorch import Gang, current_rank, dispatch
from workflow_runs import Run

if missing := [package for package in ("datasets", "peft", "trl") if find_spec(package) is None]:
    pytest.skip(f"{', '.join(missing)} not installed: pip install '.[workflows]'", allow_module_level=True)

from safetensors.torch import load_file

HP = {"steps": 8, "batch_size": 4, "checkpoint_interval": 4, "num_held_out": 8}


@pytest.fixture(scope="module")
def finetuning() -> ModuleType:
    """Imported here: its libraries take seconds, which no other file's tests shall wait for."""
    return import_module("tasks.finetuning")


@pytest.mark.slow
def test_the_workflow_returns_an_adapter_that_peft_loads(finetuning: ModuleType, tmp_path: Path) -> None:
    once = json.dumps(HP | {"checkpoint_interval": HP["steps"]})  # one evaluation
    run = Run.of("finetune", tmp_path, "first", "--hp", once, env={"WANDB_MODE": "disabled"})
    assert run.has_trained
    assert "evaluated: step 8  held_out_loss" in run.done.stderr
    found = re.search(r"Finetuned\(adapter=(\S+), base_loss=(\S+), loss=(\S+), ", run.done.stdout)
    assert found, run.done.stdout
    adapter, base_loss, loss = Path(found[1]), float(found[2]), float(found[3])
    assert loss < base_loss
    weights = load_file(adapter / "adapter_model.safetensors")
    assert any("lora_B" in name and bool(values.any()) for name, values in weights.items())
    hp = finetuning.Hyperparameters(**HP)
    tuned, tokenizer = finetuning.with_adapter("", hp, adapter)
    assert finetuning.held_out_loss(tuned, tokenizer, "", hp) == pytest.approx(loss, abs=1e-3)


# ---- The position


def tune(data: str, folder: str, kills_at: int) -> None:
    """Fine-tune in a rank, and note its examples in a file of the attempt. Rank 1 is killed once, in a step."""
    from tasks import finetuning, stream_trainer

    rank, place = current_rank(), Path(folder)
    is_first = not (place / "killed").exists()

    class Noted(stream_trainer.StreamLoader):
        def __iter__(self) -> Iterator[Any]:
            for number, batch in enumerate(super().__iter__(), start=1):
                with (place / f"rank{rank.rank}-{'first' if is_first else 'next'}").open("a") as file:
                    file.write(f"{batch['input_ids'].tolist()}\n")
                if is_first and number == kills_at and rank.rank == 1:
                    (place / "killed").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                rank.checkpoint.flush()
                yield batch

    stream_trainer.StreamLoader = Noted
    stream_trainer.train("", data, finetuning.Hyperparameters(**HP), place / f"{rank.rank}-{is_first}")


def test_a_gang_whose_rank_is_killed_goes_on_with_the_next_example(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    examples = [{"prompt": f"{number} and", "completion": f" {number + 1}"} for number in range(200)]
    data.write_text("".join(json.dumps(example) + "\n" for example in examples))
    with LocalCluster(n_workers=1, processes=False, dashboard_address=None) as local, Client(local) as client:
        dispatch.run(client, tune, str(data), str(tmp_path), 6, gang=Gang(ranks_per_worker=2)).result()
    batches = []
    for rank in range(2):
        first, then = ((tmp_path / f"rank{rank}-{name}").read_text().splitlines() for name in ("first", "next"))
        assert (len(first), len(then)) == (6, 4)  # of 8 steps, with a checkpoint after the fourth
        assert first[4:] == then[:2]
        batches += first[:4] + then
    assert len(set(batches)) == 16


def test_a_position_holds_for_another_number_of_ranks(finetuning: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    stream_trainer = import_module("tasks.stream_trainer")

    def share(rank: int, world_size: int, state: dict[str, Any] | None, num_batches: int) -> tuple[list[str], Any]:
        monkeypatch.setattr(stream_trainer, "current_rank", lambda: SimpleNamespace(rank=rank, world_size=world_size))
        stream = finetuning.split(finetuning.open_stream(""), 0.1)[0].repeat(None)
        loader = stream_trainer.StreamLoader(stream, 4, lambda items: [item["completion"] for item in items])
        if state is not None:
            loader.load_state_dict(state)
        batches = iter(loader)
        taken = [item for _ in range(num_batches) for item in next(batches)]
        return taken, json.loads(json.dumps(loader.state_dict()))

    before = [share(rank, 3, None, 2) for rank in range(3)]
    assert before[0][1] == before[1][1] == before[2][1]
    after = [share(rank, 2, before[0][1], 3) for rank in range(2)]
    alone, _ = share(0, 1, None, 12)
    assert sorted(alone) == sorted(item for taken, _ in (*before, *after) for item in taken)


# ---- Wrong inputs


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"text": "2 + 2 = 4"}\n', "the first example has the keys text, and no text for prompt and completion"),
        ("no JSON\n", "cannot be read as JSON lines"),
        (None, "cannot be read as JSON lines: FileNotFoundError"),
    ],
)
def test_data_that_cannot_be_trained_on_are_refused_with_the_values(
    content: str | None, said: str, finetuning: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "data.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=said):
        finetuning.open_stream(str(path))


@pytest.mark.parametrize("load", ["check_model", "load_base"])
def test_a_model_that_is_not_there_is_named(load: str, finetuning: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no-model' cannot be loaded: .*folder by save_pretrained"):
        getattr(finetuning, load)(str(tmp_path / "no-model"))


def test_a_folder_of_a_model_is_loaded(finetuning: ModuleType, tmp_path: Path) -> None:
    for part in finetuning.load_base("", seed=3):
        part.save_pretrained(tmp_path)
    base, tokenizer = finetuning.load_base(str(tmp_path))
    assert tokenizer.eos_token == finetuning.END
    other, _ = finetuning.load_base("", seed=3)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in base.state_dict().items())
